"""Which groups a take hands out: submission order, with a deadline.

Guarantees: the groups handed out are the first B ready ones in submission order. An unfinished group is overtaken only
if it can still be trained within `max_staleness` at the place in the order that this leaves it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_a3po.rollout.take_plan import TakePlan


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """What a take may hand out now.

    Args:
        positions: positions of the B groups in submission order, ascending; empty if the take has to wait.
        missing: how many more groups must be ready to make B.
        deadline: position of the unfinished group that may not be overtaken, `None` if there is none.
    """

    positions: tuple[int, ...] = ()
    missing: int = 0
    deadline: int | None = None


def choose_batch(
    ready: Sequence[bool], submitted_versions: Sequence[int], *, plan: TakePlan, next_take: int, takes_end: int
) -> BatchChoice:
    """Choose the batch of take number `next_take`.

    The first B ready groups are the best choice. Any other B ready groups put at most as many groups in front of every
    unfinished one, and so leave each of those at the same place or further back. If the first B ready groups break a
    deadline, all others do.

    Args:
        ready: for each group that waits to be taken, in submission order, whether it is finished and scored.
        submitted_versions: for each of these groups, the published version when its attempt was submitted.
        plan: the versions of the takes, and the bound.
        next_take: number of this take.
        takes_end: number of the first take that cannot happen, because the run or its prompts end: an unfinished group
            is not put off to that take or a later one.
    """
    batch = [position for position, is_ready in enumerate(ready) if is_ready][: plan.groups_per_batch]
    if len(batch) < plan.groups_per_batch:
        return BatchChoice(missing=plan.groups_per_batch - len(batch))
    overtaken = [position for position in range(batch[-1]) if not ready[position]]
    for place, position in enumerate(overtaken):  # every group that stays in front is unfinished and overtaken too
        take = plan.expected_take(next_take + 1, place)
        if take >= takes_end or not plan.in_bound(take, submitted_versions[position]):
            return BatchChoice(deadline=position)
    return BatchChoice(positions=tuple(batch))
