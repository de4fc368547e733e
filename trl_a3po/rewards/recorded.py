"""Rewards that episodes give themselves: those of environments, and those that a rollout function returns.

Guarantees: such a reward is the one that was recorded when its episode ended, and no reward is made up: a rollout
without one has NaN, as where a reward function returns `None`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_a3po.protocol.records import Group, Rejection, Score


class RecordedReward:
    """Stands for a column of recorded rewards among reward functions.

    Args:
        name: of the column.
    """

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, **kwargs: Any) -> list[float]:
        raise RuntimeError(f"The rewards of {self.__name__!r} are recorded when its episodes end.")


class RecordedRewards:
    """`score(group)` with the recorded rewards in their columns.

    Args:
        score: group -> the rewards of the reward functions.
        columns: number of a column of recorded rewards -> its name.
        scored: called with each group after its reward functions have returned.
    """

    def __init__(
        self,
        score: Callable[[Group], Score | Rejection],
        columns: Mapping[int, str],
        scored: Callable[[Group], None],
    ):
        self._score = score
        self._columns = columns
        self._scored = scored

    def __call__(self, group: Group) -> Score | Rejection:
        return self.completed(group, self._score(group))

    def completed(self, group: Group, score: Score | Rejection) -> Score | Rejection:
        """`score`, which the reward functions have given `group`, with the recorded rewards."""
        self._scored(group)
        if isinstance(score, Score):
            for rollout, row in zip(group.rollouts, score.rewards, strict=True):
                self._fill_in(row, {} if rollout.episode is None else rollout.episode.rewards)
        return score

    def completed_all(self, groups: Sequence[Group], scores: Sequence[Score | Rejection]) -> list[Score | Rejection]:
        return [self.completed(group, score) for group, score in zip(groups, scores, strict=True)]

    def _fill_in(self, row: list[float], rewards: Mapping[str, float | None]) -> None:
        for column, name in self._columns.items():
            reward = rewards.get(name)
            row[column] = math.nan if reward is None else reward
