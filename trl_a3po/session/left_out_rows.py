"""The rows that a run leaves out, where a person sees them: a line of the timeline for each, and warnings.

Guarantees: no more than `WARNINGS` warnings for each reason, however many rows there are.
"""

import logging
from collections import Counter

from trl_a3po.report.timeline import Timeline
from trl_a3po.rollout.left_out import LeftOut, row_in_words
from trl_a3po.session.train_rows import TrainRows

logger = logging.getLogger(__name__)

WARNINGS = 5


class LeftOutRows:
    """
    Args:
        rows: the rows of the run, of which the last one that was read is left out.
        timeline: of the run.
    """

    def __init__(self, rows: TrainRows, timeline: Timeline):
        self._rows = rows
        self._timeline = timeline
        self._warned: Counter[str] = Counter()

    def add(self, place: int, left_out: LeftOut) -> None:
        """A row is left out.

        Args:
            place: of the row in the prompt stream.
            left_out: why.
        """
        number, (reason, text) = self._rows.number, left_out
        self._timeline.write("left_out", row=place, dataset_row=number, reason=reason, text=text)
        if self._warned[reason] == WARNINGS:
            return
        self._warned[reason] += 1
        row = row_in_words(place, number).capitalize()
        last = f" Further rows {reason} are counted without a warning." if self._warned[reason] == WARNINGS else ""
        logger.warning("%s is left out. %s%s", row, text, last)
