"""An evaluation's groups: the rows of its batches, and the rewards that could not be had.

Guarantees: what the evaluation's mean leaves out is said, once a run; a mean over nothing raises.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

from trl_a3po.errors import RewardError
from trl_a3po.protocol.records import Group, Prompt, Rejection, Score
from trl_a3po.session.prompt_rows import tokenize_prompt

logger = logging.getLogger(__name__)

FIRST_NOISE_KEY = 1 << 40  # noise keys that no prompt of the training stream reaches


def evaluation_prompts(trainer, rows: list[dict[str, Any]]) -> list[Prompt]:
    """The prompts of an evaluation batch, in which each is repeated `num_generations_eval` times.

    Raises:
        ValueError: the batch does not hold whole groups.
    """
    size = trainer.num_generations_eval
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    if any(row["prompt"] != chunk[0]["prompt"] for chunk in chunks for row in chunk) or len(chunks[-1]) != size:
        raise ValueError(
            f"An evaluation batch of {len(rows)} rows does not hold whole groups of num_generations_eval={size}: "
            "set per_device_eval_batch_size to a multiple of it."
        )
    return [Prompt(i, chunk[0], tokenize_prompt(trainer, chunk[0])) for i, chunk in enumerate(chunks)]


class EvaluationScores:
    """The scores of one evaluation after the other."""

    def __init__(self):
        self._groups = 0
        self._lost: list[Rejection] = []
        self._told = False

    def fill_in(self, groups: Sequence[Group], scores: Sequence[Score | Rejection], columns: int) -> None:
        """Give each group its score: `columns` NaN for each rollout of a group that was rejected."""
        for group, score in zip(groups, scores, strict=True):
            unscored = [[math.nan] * columns] * len(group.rollouts)
            group.score = score if isinstance(score, Score) else Score(unscored)
        self._groups += len(groups)
        self._lost += [score for score in scores if isinstance(score, Rejection)]

    def end(self) -> None:
        """Say what the evaluation's mean leaves out, once a run.

        Raises:
            RewardError: it has nothing left.
        """
        groups, self._groups = self._groups, 0
        lost, self._lost = self._lost, []
        if not lost:
            return
        what = f"{len(lost)} of {groups} groups of the evaluation have no reward, the last one because: "
        what += f"{lost[-1].reason}"
        if len(lost) == groups:
            raise RewardError(f"{what}. Nothing is left to take its mean over: {lost[-1].remedy}.")
        if not self._told:
            logger.warning("%s. The evaluation's rewards are those of the others: %s.", what, lost[-1].remedy)
            self._told = True
