"""Columns beside TRL's in the table of completions: versions, staleness, and the mean weight of each completion.

Guarantees: the weight, which is known only after the loss, stands in its completion's row, whichever process trained
it; rows that were not trained are left empty.
"""

from collections.abc import MutableSequence, Sequence

import torch

from trl_a3po.distributed.team import Team
from trl_a3po.rollout.batch_rows import Row, rollouts_of


def completion_columns(rows: Sequence[Row], version: int) -> dict[str, list]:
    """One value per rollout; `w` is filled in by `RowWeights`, and there is none in an evaluation."""
    rollouts = rollouts_of(rows)
    return {
        "versions": [f"{min(r.versions)}-{max(r.versions)}" for r in rollouts],
        "staleness": [version - sum(r.versions) / len(r.versions) for r in rollouts],
        "w": [None] * len(rollouts),
    }


class RowWeights:
    """The mean weight of this process's rows of the generation batch in training."""

    def __init__(self):
        self.places_known = True
        self._means: dict[int, float] = {}  # by row of the table

    def clear(self) -> None:
        """A generation batch begins."""
        self.places_known, self._means = True, {}

    def forget_places(self) -> None:
        """Other rows come into the table: those of the batch move in it, or leave it."""
        self.places_known = False

    def add(self, log_rows: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> None:
        """
        Args:
            log_rows: `(B,)`, each row's place in the table.
            weight, mask: `(B, T)`.
        """
        if self.places_known:
            means = (weight * mask).sum(1) / mask.sum(1).clamp(min=1)
            self._means.update(zip(log_rows.tolist(), means.tolist(), strict=True))

    def show(self, team: Team, column: MutableSequence[float | None]) -> None:
        """Fill the table's column `w`, whose rows are those of all processes; all of them call this, while the places
        are known."""
        for weights in team.gather(self._means) or ():
            for row, weight in weights.items():
                column[row] = weight
