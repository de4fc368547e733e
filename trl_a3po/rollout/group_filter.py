"""What happens to a scored group before it may be trained on: the filter for groups without variance, and the user's
`on_group`.

Guarantees:
- a group is dropped only for a reason that is counted;
- what `on_group` returns is checked before it is used: it has the same prompt and as many rollouts, every rollout is
  aligned and has only versions that the engine stamped in this group, and every rollout has one finite reward or NaN
  per reward function;
- `on_group` is called once per group, one group at a time.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from trl_a3po.errors import RewardError
from trl_a3po.protocol.plain_copy import plain_copy
from trl_a3po.protocol.records import Group, Rejection, Rollout, Score

NO_VARIANCE = Rejection("no variance in its rewards")
RESOLUTION = 1e-6  # of the float32 that rewards are summed in

OnGroup = Callable[[Group], Group | Rejection | None]


class GroupFilter:
    """`filter(group)` scores a group and decides whether it is trained on, changed or rejected.

    Args:
        score: group -> its rewards, or a `Rejection`.
        drops_zero_variance: reject groups whose rewards are all equal.
        weights: called for each group. It returns one weight per reward function, which may change during a run.
        aggregation: `multi_objective_aggregation` of `GRPOConfig`.
        on_group: called with a copy of each scored group that the filter has not rejected. It returns `None` to accept
            the group, a `Rejection` to have it replaced, or the group to train on instead.
    """

    def __init__(
        self,
        score: Callable[[Group], Score | Rejection],
        *,
        drops_zero_variance: bool = False,
        weights: Callable[[], Sequence[float]] = tuple,
        aggregation: str = "sum_then_normalize",
        on_group: OnGroup | None = None,
    ):
        self._score = score
        self._drops_zero_variance = drops_zero_variance
        self._weights = weights
        self._aggregation = aggregation
        self._on_group = on_group
        self._one_at_a_time = threading.Lock()

    def __call__(self, group: Group) -> Score | Group | Rejection:
        """
        Raises:
            RewardError: `on_group` raised, or returned something that cannot be trained on instead of the group.
        """
        score = self._score(group)
        if isinstance(score, Rejection):
            return score
        if self._drops_zero_variance and has_no_variance(score.rewards, self._weights(), self._aggregation):
            return NO_VARIANCE
        return score if self._on_group is None else self._ask_on_group(self._on_group, group, score)

    def _ask_on_group(self, on_group: OnGroup, group: Group, score: Score) -> Group | Rejection:
        columns = len(score.rewards[0])
        prompt = replace(
            group.prompt, example=plain_copy(group.prompt.example), token_ids=list(group.prompt.token_ids)
        )
        copy = replace(group, prompt=prompt, rollouts=[_copy(rollout) for rollout in group.rollouts], score=score)
        try:
            with self._one_at_a_time:
                answer = on_group(copy)
        except BaseException as error:  # also an exit
            raise RewardError(f"on_group raised {error!r} for prompt {group.prompt.index}.") from error
        if isinstance(answer, Rejection):
            return answer
        if answer is not None and not isinstance(answer, Group):
            raise RewardError(
                f"on_group returned a {type(answer).__name__} for prompt {group.prompt.index}: return None to accept "
                "the group, a Rejection to have it replaced, or a Group to train on instead."
            )
        changed = copy if answer is None else answer  # on_group may have changed the copy in place
        try:
            check_replacement(changed, group, columns)
        except ValueError as error:
            raise RewardError(
                f"on_group returned a group that cannot replace the group of prompt {group.prompt.index}: {error}"
            ) from error
        return replace(group, rollouts=list(changed.rollouts), score=changed.score)


def has_no_variance(rewards: Sequence[Sequence[float]], weights: Sequence[float], aggregation: str) -> bool:
    """Whether the advantages of a group are zero, whatever else is in its batch.

    Args:
        rewards: for each rollout, one reward per function; NaN where a function returned `None`.
        weights: one weight per function.
        aggregation: `"sum_then_normalize"` for the weighted sum of the rewards; `"normalize_then_sum"` for the
            weighted sum of each function's rewards after normalisation within the group.
    """
    if aggregation == "normalize_then_sum":
        columns = [_normalised([row[column] for row in rewards]) for column in range(len(weights))]
        rewards = list(zip(*columns, strict=True))
    sums = [
        math.fsum(weight * value for weight, value in zip(weights, row, strict=True) if not math.isnan(value))
        for row in rewards
        if not all(map(math.isnan, row))  # a rollout to which no function applies has no advantage
    ]
    return not sums or max(sums) - min(sums) <= RESOLUTION * max(1.0, *map(abs, sums))


def check_replacement(changed: Group, group: Group, columns: int) -> None:
    """Raise `ValueError` unless `changed` can be trained on instead of `group`, with `columns` reward functions."""
    if (changed.prompt.index, changed.prompt.token_ids) != (group.prompt.index, group.prompt.token_ids):
        raise ValueError("its prompt is a different one; only rollouts and score may change.")
    if len(changed.rollouts) != len(group.rollouts):
        raise ValueError(
            f"it has {len(changed.rollouts)} rollouts instead of {len(group.rollouts)}; to drop some, return a "
            "Rejection or give them no reward (NaN)."
        )
    stamped = {version for rollout in group.rollouts for version in rollout.versions}
    for rollout in changed.rollouts:
        _copy(rollout)  # raises if its lists are not aligned
        if not stamped.issuperset(rollout.versions):
            strange = sorted(set(rollout.versions) - stamped)
            raise ValueError(
                f"a token has version {strange[0]}, but the group's tokens were sampled from versions "
                f"{sorted(stamped)}; a version is stamped where a token is sampled, and stays with the token."
            )
    score, size = changed.score, len(group.rollouts)
    if score is None or [len(row) for row in score.rewards] != [columns] * size:
        raise ValueError(f"its score must hold {size} rows of {columns} rewards, one per reward function.")
    if any(math.isinf(value) for row in score.rewards for value in row):
        raise ValueError("a reward is infinite; rewards are finite numbers, or NaN where a function does not apply.")
    for name, values in score.extra_columns.items():
        if len(values) != size:
            raise ValueError(f"its extra column {name!r} has {len(values)} values instead of {size}.")


def _copy(rollout: Rollout) -> Rollout:
    return replace(
        rollout,
        token_ids=list(rollout.token_ids),
        logps=list(rollout.logps),
        versions=list(rollout.versions),
    )


def _normalised(values: list[float]) -> list[float]:
    """As GRPOTrainer normalises one function's rewards within a group."""
    known = [value for value in values if not math.isnan(value)]
    mean = math.fsum(known) / max(len(known), 1)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / max(len(known) - 1, 1))
    return [(value - mean) / (std + 1e-4) for value in values]
