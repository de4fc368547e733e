"""The rows of a batch, one per rollout, and what TRL is given for them instead of computing it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trl_a3po.protocol.images import PromptImages
from trl_a3po.protocol.plain_copy import plain_copy
from trl_a3po.protocol.records import Group, Rollout, Score

Row = tuple[Group, int]  # a group and the number of one of its rollouts


def rollouts_of(rows: Sequence[Row]) -> list[Rollout]:
    return [group.rollouts[number] for group, number in rows]


def prompt_ids_of(row: Row) -> list[int]:
    """The tokens of a row's prompt, which an environment may have changed for this rollout alone."""
    group, number = row
    episode = group.rollouts[number].episode
    return group.prompt.token_ids if episode is None else episode.prompt_ids


def images_of_row(row: Row) -> PromptImages | None:
    """The images of a row's prompt and, in an episode, of its completion; `None` if there are none."""
    group, number = row
    episode = group.rollouts[number].episode
    own: PromptImages | None = None if episode is None else episode.images
    images = group.prompt.images if own is None else own
    return images if images is not None and images.images else None


def pictures_of_row(row: Row) -> tuple[list[Any], list[Any]]:
    """The images that a row's prompt shows, and those that its completion shows."""
    group, number = row
    episode, images = group.rollouts[number].episode, images_of_row(row)
    every = [] if images is None else list(images.images)
    in_prompt = len(every) - (0 if episode is None else episode.completion_images)
    return every[:in_prompt], every[in_prompt:]


def example_of(row: Row) -> dict[str, Any]:
    """The dataset row as TRL receives it: with the prompt of this rollout, and with what its episode adds. The prompt
    of an episode shows the images of the row's columns, so that TRL has none to put into it."""
    group, number = row
    episode = group.rollouts[number].episode
    if episode is None:
        return dict(group.prompt.example)
    example = group.prompt.example | episode.columns | {"prompt": plain_copy(episode.prompt)}
    return example if group.prompt.messages is None else {**example, "images": []}


def messages_of(rows: Sequence[Row]) -> list[Any]:
    """The completions of episodes, as reward functions and the table of completions show them."""
    return [plain_copy(rollout.episode.messages) for rollout in rollouts_of(rows) if rollout.episode is not None]


def sampled_masks(rows: Sequence[Row]) -> list[list[int]]:
    """For each completion, 1 where a policy sampled the token, and 0 at the tokens of tools."""
    return [[int(version >= 0) for version in rollout.versions] for rollout in rollouts_of(rows)]


def replayed_turns(rows: Sequence[Row]) -> tuple[Any, ...]:
    """What `GRPOTrainer._tool_call_loop` returns for episodes that have been played."""
    rollouts = rollouts_of(rows)
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    return (
        sampled_masks(rows),
        messages_of(rows),
        [list(rollout.token_ids) for rollout in rollouts],
        [list(rollout.logps) for rollout in rollouts],
        sum(episode.tool_calls for episode in episodes),
        sum(episode.tool_failures for episode in episodes),
        [pictures_of_row(row)[1] for row in rows],
    )


def replayed_rollouts(rows: Sequence[Row]) -> dict[str, Any]:
    """What a `rollout_func` of TRL returns for episodes that have been played."""
    rollouts = rollouts_of(rows)
    return {
        "prompt_ids": [list(prompt_ids_of(row)) for row in rows],
        "completion_ids": [list(rollout.token_ids) for rollout in rollouts],
        "logprobs": [list(rollout.logps) for rollout in rollouts],
        "env_mask": sampled_masks(rows),
    }


def behavior_versions(rows: Sequence[Row], length: int) -> torch.Tensor:
    """`(B, length)` int32: the version of each completion token, and -1 for tokens that no policy sampled: those of
    tools and the padding after a completion."""
    versions = torch.full((len(rows), length), -1, dtype=torch.int32)
    for row, rollout in enumerate(rollouts_of(rows)):
        versions[row, : len(rollout.versions)] = torch.tensor(rollout.versions, dtype=torch.int32)
    return versions


def behavior_logps(rows: Sequence[Row], length: int) -> torch.Tensor:
    """`(B, length)` float32: the log-prob with which each completion token was sampled, and 0 at padding."""
    logps = torch.zeros(len(rows), length, dtype=torch.float32)
    for row, rollout in enumerate(rollouts_of(rows)):
        logps[row, : len(rollout.logps)] = torch.tensor(rollout.logps, dtype=torch.float32)
    return logps


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
