"""Columns added to TRL's table of completions: versions, staleness, and the mean weight of each completion.

Guarantees: the weight, which is known only after the loss, is in the row of its completion, whichever process trained
it; the weight of a row that was not trained is empty.
"""

from collections.abc import MutableSequence, Sequence
from typing import Any

import torch

from trl_a3po.distributed.team import Team
from trl_a3po.rollout.batch_rows import Row, rollouts_of


def completion_columns(rows: Sequence[Row], version: int) -> dict[str, list[Any]]:
    """One value per rollout in each column. `RowWeights` fills in `w`, which stays empty in an evaluation."""
    versions = [rollout.sampled_versions for rollout in rollouts_of(rows)]
    return {
        "versions": [f"{min(sampled)}-{max(sampled)}" for sampled in versions],
        "staleness": [version - sum(sampled) / len(sampled) for sampled in versions],
        "w": [None] * len(versions),
    }


def make_contents_alike(column: MutableSequence[Any]) -> None:
    """If a message of the conversations in `column` has content parts, such as images of tools, give all of them
    parts: TRL cannot write a table in which some contents are text and others lists."""
    messages = [message for conversation in column if isinstance(conversation, list) for message in conversation]
    if not any(isinstance(message.get("content"), list) for message in messages):
        return
    for place, conversation in enumerate(column):
        if isinstance(conversation, list):
            column[place] = [_with_parts(message) for message in conversation]


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


class RowWeights:
    """The mean weight of each row that this process trains, for the current generation batch."""

    def __init__(self) -> None:
        self.places_known = True
        self._means: dict[int, float] = {}  # by place in the table

    def clear(self) -> None:
        """A generation batch begins."""
        self.places_known, self._means = True, {}

    def forget_places(self) -> None:
        """The table gets other rows, so the rows of the batch move in it or leave it."""
        self.places_known = False

    def add(self, log_rows: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> None:
        """
        Args:
            log_rows: `(B,)`, the place of each row in the table.
            weight, mask: `(B, T)`.
        """
        if self.places_known:
            means = (weight * mask).sum(1) / mask.sum(1).clamp(min=1)
            self._means.update(zip(log_rows.tolist(), means.tolist(), strict=True))

    def show(self, team: Team, column: MutableSequence[float | None]) -> None:
        """Fill `column`, the column `w` of the table, which holds the rows of all processes. Every process calls this,
        while the places are known."""
        for weights in team.gather(self._means) or ():
            for row, weight in weights.items():
                column[row] = weight
