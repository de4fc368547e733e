"""The rows of a batch, one per rollout, and what TRL is given for them instead of computing it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trl_a3po.protocol.records import Group, Rollout, Score

Row = tuple[Group, int]  # a group and the number of one of its rollouts


def rollouts_of(rows: Sequence[Row]) -> list[Rollout]:
    return [group.rollouts[number] for group, number in rows]


def behavior_versions(rows: Sequence[Row], length: int) -> torch.Tensor:
    """`(B, length)` int32: the version of each completion token, and -1 for tokens that no policy sampled: those of
    tools and the padding after a completion."""
    versions = torch.full((len(rows), length), -1, dtype=torch.int32)
    for row, rollout in enumerate(rollouts_of(rows)):
        versions[row, : len(rollout.versions)] = torch.tensor(rollout.versions, dtype=torch.int32)
    return versions


def trained_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """`(B, T)`: 1 where a token of the batch is trained, as TRL's loss has it: neither padding nor the tokens of a
    tool."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask if batch.get("tool_mask") is None else mask * batch["tool_mask"]


def replayed_rewards(rows: Sequence[Row], column: int) -> Callable[..., list[float]]:
    """A reward function that returns the rewards which the user's function number `column` has already given these
    rows."""
    rewards = [_score(group).rewards[number][column] for group, number in rows]
    return lambda **kwargs: rewards


def replay_logs(
    rows: Sequence[Row],
    log_extra: Callable[[str, list[Any]], object],
    log_metric: Callable[[str, float], object],
) -> None:
    """Pass on what the reward functions recorded, in row order.

    A row whose group has no value for a column gets `None`. A metric, which is recorded once per group, is passed on
    with the group's first rollout.
    """
    for column in sorted({column for group, _ in rows for column in _score(group).extra_columns}):
        recorded = [(_score(group).extra_columns.get(column), number) for group, number in rows]
        log_extra(column, [None if values is None else values[number] for values, number in recorded])
    for group, number in rows:
        for name, value in _score(group).metrics if number == 0 else ():
            log_metric(name, value)


def _score(group: Group) -> Score:
    assert group.score is not None, "a group is taken only after it has been scored"
    return group.score
