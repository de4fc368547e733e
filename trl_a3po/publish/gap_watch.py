"""Whether the engine is the policy: the gap between the engine's log-probs and the trainer's, watched through a run.

Guarantees: the first gap sets what is normal for this model, dtype and engine, within bounds for the dtype; a gap
beyond that is a warning, and `PATIENCE` of them in a row are an error. The caller leaves out tokens that cannot be
compared, such as those of another policy version.

The bounds are a hundred times what float32 causes by rounding, and three times what bfloat16 causes in the output
layer of a large model: a gap below the lower bound is never unusual, and one above the upper bound always is, also at
the start of a run.
"""

import logging
import math
from collections.abc import Callable

import torch

from trl_a3po.errors import DeliveryError

logger = logging.getLogger(__name__)

MULTIPLE = 10  # of the first gap
PATIENCE = 5  # measurements in a row
BOUNDS = {torch.float32: (0.005, 0.02), torch.float16: (0.02, 0.1), torch.bfloat16: (0.1, 0.3)}

CAUSES = (
    "Likely causes: a buffer, an attribute or a hook of the model computes something that its configuration does not "
    "say, so that the engine does not have it; a weight was written to through .data in a few places; the engine "
    "computes with other kernels or in a coarser dtype."
)


class GapWatch:
    """
    Args:
        where: what the gaps are measured on, as in "the batches".
        dtype: the coarser dtype of the engine's forward and the trainer's.
        most: the largest gap that is normal; `None` takes it from the first gap and the dtype.
        explain: returns what is known about the cause, as sentences.
    """

    def __init__(
        self, where: str, dtype: torch.dtype, most: float | None = None, explain: Callable[[], str] = lambda: ""
    ):
        self._where = where
        self._bounds = BOUNDS.get(dtype, BOUNDS[torch.bfloat16])
        self._name = str(dtype).removeprefix("torch.")
        self._most = most
        self._explain = explain
        self._first: float | None = None
        self._in_a_row = 0

    @property
    def limit(self) -> float:
        """The largest gap that is normal."""
        if self._most is not None:
            return self._most
        least, most = self._bounds
        return most if self._first is None else min(most, max(least, MULTIPLE * self._first))

    def see(self, gap: float) -> bool:
        """Whether `gap`, a mean |Δ log-prob|, is normal. If it is not, a warning says so the first time.

        Raises:
            DeliveryError: it is the last of `PATIENCE` gaps in a row that are not.
        """
        if self._first is None and math.isfinite(gap):
            self._first = gap
        if gap <= self.limit:
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        if self._in_a_row == PATIENCE:
            found = self._found(gap)
            raise DeliveryError(f"{found} This is measurement number {PATIENCE} in a row. {self._advice(gap)}")
        if self._in_a_row == 1:
            logger.warning("%s %s", self._found(gap), self._advice(gap))
        return False

    def _found(self, gap: float) -> str:
        least, most = self._bounds
        rule = (
            f"max_engine_gap={self._most:g}"
            if self._most is not None
            else f"{MULTIPLE} times the first gap, which was {self._first or math.nan:.3g}, and from {least:g} to "
            f"{most:g} in {self._name}"
        )
        return (
            f"The engine does not sample from the policy that is trained: under the same weights, its log-probs of "
            f"{self._where} are {gap:.3g} from the trainer's on average, more than {self.limit:.3g} ({rule})."
        )

    def _advice(self, gap: float) -> str:
        return (
            f"{self._explain() or CAUSES} Correct the cause, or set max_engine_gap to more than {gap:.3g} if such a "
            "gap is meant, as with a quantised vLLM server."
        )
