"""When a group may be submitted: pure arithmetic on positions, takes and versions.

Guarantees: a group is admitted only if the take that is expected to hand it out happens within `max_staleness`
optimizer steps of the published version, and only if that take belongs to the run. What counts is the number of
outstanding groups, never a cumulative number, so neither a resumed run nor a rejected group can widen the bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TakePlan:
    """Which policy version every take of the run happens at, and how far behind it a token may be.

    A group at position p among the groups waiting to be taken (0-based, submission order) is expected at take
    `next_take + p // groups_per_batch`. For K optimizer steps per batch and a run that starts at version v0,
    `version_of_take(n) = v0 + n·K`. While the batch taken at version t is trained, i = groups_per_batch + p groups
    are ahead (that batch included) and the next take happens at t + K. Therefore

        version_of_take(next_take + p // B) = t + K + K·floor(p / B) = t + K·floor(i / B),

    which makes `capacity` the rule "submit only if t + K·floor(i / B) ≤ published version + max_staleness".

    Args:
        groups_per_batch: B, the groups that one take hands out.
        max_staleness: largest staleness of a trained token, in optimizer steps.
        version_of_take: take number n (0-based) -> the policy version it happens at, at most; nondecreasing.
        total_takes: takes of the run; no group is admitted for a later take.
        lag: with `schedule="fixed_lag"`, how many takes before its own take a batch is sampled; `None` otherwise.
    """

    groups_per_batch: int
    max_staleness: int
    version_of_take: Callable[[int], int]
    total_takes: int
    lag: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("groups_per_batch", 1), ("max_staleness", 0), ("total_takes", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}, but it must be at least {least}.")

    def expected_take(self, next_take: int, position: int) -> int:
        """The take that hands out the group at `position` (0-based) if no other group overtakes it."""
        return next_take + position // self.groups_per_batch

    def in_bound(self, take: int, version: int) -> bool:
        """Whether a token sampled at `version` may still be trained at `take`."""
        return take < self.total_takes and self.version_of_take(take) <= version + self.max_staleness

    def lagged_version(self, take: int) -> int:
        """With a `lag`: the version from which the batch of take number `take` is sampled."""
        assert self.lag is not None, "only schedule='fixed_lag' has a lag"
        return self.version_of_take(max(0, take - self.lag))

    def capacity(self, next_take: int, published_version: int) -> int:
        """How many groups may wait to be taken: another group is submitted only while fewer do."""
        take = next_take
        while self.in_bound(take, published_version):
            take += 1
        return (take - next_take) * self.groups_per_batch


def starves(weight_sync_steps: int, steps_per_batch: int, max_staleness: int) -> bool:
    """Whether the settings make some take impossible to fill, whatever the engine does.

    With K = `steps_per_batch`, takes happen at versions n·K, and the published version is then the last multiple of
    W = `weight_sync_steps`. The published version lags by n·K mod W, which grows up to W - gcd(W, K). If it lags by
    more than `max_staleness`, no group may be submitted before the next publish, and that publish comes only after
    this take. Publishing at a take whenever W steps have passed since the last publish lags no more than that.
    """
    return weight_sync_steps - math.gcd(weight_sync_steps, steps_per_batch) > max_staleness


def staleness_of_schedule(schedule: str, max_staleness: int) -> int:
    """The queue's `max_staleness` under a schedule. "sync" and "periodic" are a queue that never samples ahead.

    Raises:
        ValueError: the schedule is neither "async" nor "sync", "periodic" or "fixed_lag".
    """
    match schedule:
        case "async" | "fixed_lag":
            return max_staleness
        case "sync" | "periodic":
            return 0
    raise ValueError(
        f'schedule is "{schedule}", but it must be "async", "sync", "periodic" or "fixed_lag": choose one of these.'
    )
