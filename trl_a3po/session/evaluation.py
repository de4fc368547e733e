"""The groups of an evaluation: the prompts of its batches, and the groups that got no reward.

Guarantees: a prompt that cannot be used ends an evaluation with an error; if the mean of an evaluation leaves groups
out, a warning says so, once per run; if it leaves all of them out, an error is raised.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import datasets
from torch.utils.data import Dataset, IterableDataset

from trl_a3po.checks.data import UNDECODABLE, stored_row
from trl_a3po.checks.images import UnusablePrompt
from trl_a3po.errors import RewardError
from trl_a3po.protocol.records import Group, Prompt, Rejection, Score
from trl_a3po.rollout.prompt_stream import TokenizedPrompt
from trl_a3po.session.prompt_images import messages_with_images
from trl_a3po.session.prompt_rows import tokenize_prompt

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer

logger = logging.getLogger(__name__)

PROMPT_COLUMNS = ("prompt", "image", "images")
NOT_LEFT_OUT = (
    "Rows of an evaluation are not left out, because its means would then be those of other rows each time. "
    "eval_on_start=True finds such rows before training."
)
FIRST_NOISE_KEY = 1 << 40  # no prompt of the training stream has a noise key as high


def evaluation_prompts(trainer: "A3POTrainer", rows: list[dict[str, Any]]) -> list[Prompt]:
    """The prompts of an evaluation batch, in which each row is repeated `num_generations_eval` times.

    Raises:
        ValueError: the batch does not hold whole groups.
    """
    size = trainer.num_generations_eval
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    if (
        any(row.get(name) != chunk[0].get(name) for name in PROMPT_COLUMNS for chunk in chunks for row in chunk)
        or len(chunks[-1]) != size
    ):
        raise ValueError(
            f"An evaluation batch of {len(rows)} rows does not hold whole groups of num_generations_eval={size}: "
            "set per_device_eval_batch_size to a multiple of it."
        )
    return [Prompt(i, chunk[0], *_evaluated_prompt(trainer, chunk[0])) for i, chunk in enumerate(chunks)]


class EvaluatedRows(Dataset[dict[str, Any]]):
    """The rows of an evaluation dataset. One whose images cannot be read raises an error with its number."""

    def __init__(self, dataset: datasets.Dataset):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = stored_row(self._dataset, number)
        try:
            if isinstance(row.get("prompt"), list):  # and not text, or a prompt that its environment gives
                messages_with_images(row)
        except UnusablePrompt as error:
            raise ValueError(f"Row {number} of the evaluation dataset: {error} {NOT_LEFT_OUT}") from error
        return row


class EvaluatedStream(IterableDataset[dict[str, Any]]):
    """The rows of an evaluation dataset that is a stream. One that cannot be read, such as one whose image `datasets`
    cannot decode, raises an error with its number.

    Args:
        dataset: as TRL has shuffled it, each row as often as a group has completions.
        repeats: how often that is.
        seed: of the shuffling.
    """

    def __init__(self, dataset: datasets.IterableDataset, repeats: int, seed: int):
        self._dataset = dataset
        self._repeats = repeats
        self._seed = seed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows_read = 0
        try:
            for row in self._dataset:
                rows_read += 1
                yield row
        except UNDECODABLE as error:
            raise ValueError(
                f"Row {rows_read // self._repeats} of eval_dataset.shuffle(seed={self._seed}), which is how TRL reads "
                f"a stream, cannot be read: {error}. {NOT_LEFT_OUT}"
            ) from error


def _evaluated_prompt(trainer: "A3POTrainer", row: dict[str, Any]) -> TokenizedPrompt:
    try:
        return tokenize_prompt(trainer, row)
    except UnusablePrompt as error:
        raise ValueError(f"A row of the evaluation dataset: {error} {NOT_LEFT_OUT}") from error


class EvaluationScores:
    """Fills in the scores of one evaluation after the other, and counts the groups without a reward."""

    def __init__(self) -> None:
        self._groups = 0
        self._rejections: list[Rejection] = []
        self._warned = False

    def fill_in(self, groups: Sequence[Group], scores: Sequence[Score | Rejection], columns: int) -> None:
        """Give each group its score. Each rollout of a rejected group gets `columns` rewards of NaN."""
        for group, score in zip(groups, scores, strict=True):
            unscored = [[math.nan] * columns] * len(group.rollouts)
            group.score = score if isinstance(score, Score) else Score(unscored)
        self._groups += len(groups)
        self._rejections += [score for score in scores if isinstance(score, Rejection)]

    def end(self) -> None:
        """End an evaluation. Warn, once per run, if its mean leaves groups out.

        Raises:
            RewardError: no group has a reward.
        """
        groups, self._groups = self._groups, 0
        rejections, self._rejections = self._rejections, []
        if not rejections:
            return
        last = rejections[-1]
        counts = f"{len(rejections)} of {groups} groups of the evaluation have no reward, the last one because: "
        if len(rejections) == groups:
            raise RewardError(f"{counts}{last.reason}. No group is left for its mean reward: {last.remedy}.")
        if not self._warned:
            logger.warning("%s%s. The mean reward is that of the other groups: %s.", counts, last.reason, last.remedy)
            self._warned = True
