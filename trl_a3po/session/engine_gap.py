"""The gap between the engine's log-probs and the trainer's, in a run: what is compared, and what follows from it.

Guarantees: only tokens count that both computed under the same weights and without noise; once the gap is not normal,
the next publish holds every weight, in case one was changed in a way that fingerprints do not notice.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from trl_a3po.checks.noise import noise
from trl_a3po.config import A3POConfig
from trl_a3po.publish.adapter_or_merged import published_spec
from trl_a3po.publish.gap_watch import GapWatch
from trl_a3po.publish.uncarried_buffers import unlike_configuration
from trl_a3po.session.build_engine import engine_dtype

MIN_TOKENS = 64  # fewer are added to those of the next batch


class EngineGapOfRun:
    """
    Args:
        args: the settings.
        model: the policy.
        mixed_precision: of the accelerator.
    """

    def __init__(self, args: A3POConfig, model: PreTrainedModel, mixed_precision: str):
        self._args = args
        self._model = model
        self._dtype = engine_dtype(args, model, mixed_precision)
        dtypes = (self._dtype, forward_dtype(model, mixed_precision))
        coarser = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        self.of_probes = GapWatch("the probe tokens", coarser, args.max_engine_gap, self._explain)
        self._of_batches = GapWatch("the fresh tokens", coarser, args.max_engine_gap, self._explain)
        self._is_noisy = bool(noise(args, model))
        self._sum, self._count = 0.0, 0
        self._batch_was_normal = self._probes_were_normal = True
        self._sent_all = False

    def see(self, gaps: Sequence[tuple[float, int]]) -> None:
        """As `Session.see_gaps`."""
        if self._is_noisy:
            return
        self._sum += sum(total for total, _ in gaps)
        self._count += sum(count for _, count in gaps)
        if self._count >= MIN_TOKENS:
            self._batch_was_normal = self._of_batches.see(self._sum / self._count)
            self._sum, self._count = 0.0, 0

    def probed(self, normal: bool) -> None:
        """Note whether the delivery check has found a normal gap."""
        self._probes_were_normal = normal

    def asks_for_all_weights(self) -> bool:
        """Whether the next update is to hold every weight: once, when the gap has stopped to be normal."""
        unusual = not (self._batch_was_normal and self._probes_were_normal)
        asks, self._sent_all = unusual and not self._sent_all, unusual
        return asks

    def _explain(self) -> str:
        names = unlike_configuration(self._model, published_spec(self._args, self._model, self._dtype))
        if not names:
            return ""
        return (
            f"The cause is probably that {names[0]!r} ({len(names)} in all) is not what the model's configuration "
            "gives: an engine computes such a buffer from the configuration, so set there what changes it."
        )


def forward_dtype(model: PreTrainedModel, mixed_precision: str) -> torch.dtype:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype: torch.dtype = names.get(mixed_precision, model.dtype)
    return dtype
