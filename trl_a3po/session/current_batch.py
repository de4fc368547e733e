"""`CurrentBatch`: what the trainer keeps of a generation batch between its take and its loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trl_a3po.distributed.rank_shares import rank_share
from trl_a3po.protocol.images import PromptImages
from trl_a3po.report.completions_table import RowWeights
from trl_a3po.rollout.batch_rows import Row, images_of_row


@dataclass(slots=True)
class CurrentBatch:
    """The generation batch that a trainer is working on.

    Args:
        rows: this process's rows, one per rollout, from the take until TRL has prepared them; `None` otherwise.
        images: those of one row of the batch, in whichever process; `None` if no row has any.
        sampled, scored: TRL has asked for the completions, and for the rewards, of `rows`.
        take_number: number of the last take within its generation batch. It is 0 unless `schedule="periodic"`, where
            every micro-step takes its own groups.
        has_reward: some group of the takes so far has a reward.
        compared_at: the version of the last batch in which `compare_proximal_every` had the anchors compared.
        rewards: those of the rows that TRL has scored last, one number for each reward function.
        row_weights: the weight that the loss gave each row, for the table of completions.
    """

    rows: list[Row] | None = None
    images: PromptImages | None = None
    sampled: bool = False
    scored: bool = False
    take_number: int = 0
    has_reward: bool = False
    compared_at: int | None = None
    rewards: list[list[float]] = field(default_factory=list)
    row_weights: RowWeights = field(default_factory=RowWeights)

    @property
    def at_first_take(self) -> bool:
        """The last take has begun a generation batch."""
        return self.take_number == 0

    def take_share(self, rows: Sequence[Row], rank: int, processes: int) -> list[Row]:
        """Of the rows of all processes, hold those of process `rank`, and return them."""
        self.images = next((images for row in rows if (images := images_of_row(row)) is not None), None)
        self.rows = rank_share(rows, rank, processes)
        return self.rows

    def pop_rows(self) -> list[Row]:
        """The rows, which TRL has prepared now."""
        assert self.rows is not None, "no rows have been taken"
        rows, self.rows = self.rows, None
        return rows

    def starts_comparison(self, every: int, version: int) -> bool:
        """Whether the batch taken at `version` is the next one to compare, with one comparison every `every` steps."""
        due = self.compared_at is None or version // every > self.compared_at // every
        if due:
            self.compared_at = version
        return due
