"""The rows of a batch, one for each rollout, and what TRL is handed for them in place of what it would compute."""

from collections.abc import Callable, Sequence

import torch

from trl_a3po.protocol.records import Group, Rollout

Row = tuple[Group, int]  # a group and the number of one of its rollouts


def rollouts_of(rows: Sequence[Row]) -> list[Rollout]:
    return [group.rollouts[number] for group, number in rows]


def behavior_versions(rows: Sequence[Row], length: int) -> torch.Tensor:
    """`(B, length)` int32, aligned with the completion tokens, -1 behind them."""
    versions = torch.full((len(rows), length), -1, dtype=torch.int32)
    for row, rollout in enumerate(rollouts_of(rows)):
        versions[row, : len(rollout.versions)] = torch.tensor(rollout.versions, dtype=torch.int32)
    return versions


def replayed_rewards(rows: Sequence[Row], column: int) -> Callable[..., list[float]]:
    """A reward function that returns what one of the user's functions has already returned for these rows."""
    rewards = [group.score.rewards[number][column] for group, number in rows]
    return lambda **kwargs: rewards


def replay_logs(rows: Sequence[Row], log_extra: Callable, log_metric: Callable) -> None:
    """Pass on what reward functions recorded, in row order; rows without a value for a column get `None`. What was
    recorded once for a group is passed on with its first rollout."""
    for column in sorted({column for group, _ in rows for column in group.score.extra_columns}):
        log_extra(
            column,
            [
                group.score.extra_columns[column][number] if column in group.score.extra_columns else None
                for group, number in rows
            ],
        )
    for group, number in rows:
        for name, value in group.score.metrics if number == 0 else ():
            log_metric(name, value)
