"""Metrics of the micro-batches since the last log: statistics of the objective, engine gaps, compared anchors.

Guarantees: every token counts once, whichever process trained it; nothing in this file affects the loss.
"""

import functools
import operator
from typing import Any, TypeVar

import torch

from trl_a3po.distributed.team import Team
from trl_a3po.objectives import ProximalComparison
from trl_a3po.objectives.stats import EntropyStats, Tally
from trl_a3po.report.engine_gap import EngineGap
from trl_a3po.rollout.batch_rows import trained_mask

TallyKind = TypeVar("TallyKind", bound=Tally)


class LossMetrics:
    """Sums over the micro-batches of this process, until `collect` adds up those of all processes.

    Args:
        caches_are_kept: engine caches outlive a publish (`kv_on_publish="keep"`).
    """

    def __init__(self, *, caches_are_kept: bool):
        self._caches_are_kept = caches_are_kept
        self._tallies: list[Tally] = []
        self._comparisons: dict[str, ProximalComparison] = {}  # by minibatch
        self._batch_gap: EngineGap | None = None

    @property
    def empty(self) -> bool:
        return not self._tallies

    def add(
        self,
        stats: Tally,
        policy_logps: torch.Tensor,
        entropies: torch.Tensor,
        inputs: dict[str, Any],
        version: int,
    ) -> None:
        """Add a micro-batch that was trained at `version`, with the `stats` of the objective; `policy_logps` and
        `entropies` are `(B, T)`."""
        gaps = self._gaps(policy_logps, inputs, version)
        self._batch_gap = gaps[0] if self._batch_gap is None else self._batch_gap + gaps[0]
        entropy = EntropyStats.of({"entropy": entropies}, trained_mask(inputs).bool(), inputs["staleness"])
        tallies = [stats, entropy, *gaps]
        self._tallies = [a + b for a, b in zip(self._tallies, tallies, strict=True)] if self._tallies else tallies

    def compare(
        self,
        minibatch: str,
        policy_logps: torch.Tensor,
        anchor_logps: torch.Tensor,
        advantages: torch.Tensor,
        inputs: dict[str, Any],
        *,
        epsilon_low: float,
        epsilon_high: float,
    ) -> None:
        """Compare the anchor that was used with the recomputed one.

        Args:
            minibatch: `"first"` or `"later"`, by its place in the generation batch.
            policy_logps, anchor_logps: `(B, T)`, as is the recomputed anchor, `inputs["compared_logps"]`.
            advantages: `(B,)`.
        """
        comparison = ProximalComparison.of_batch(
            policy_logps,
            inputs["sampling_per_token_logps"],
            inputs["staleness"],
            advantages,
            trained_mask(inputs),
            proximal_logps=anchor_logps,
            recomputed_logps=inputs["compared_logps"],
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
        )
        before = self._comparisons.get(minibatch)
        self._comparisons[minibatch] = comparison if before is None else before + comparison

    def collect(self, team: Team) -> dict[str, float]:
        """The metrics of the micro-batches of all processes, in the main process, and empty in the others. Every
        process calls this, and starts again from zero."""
        tallies, self._tallies = self._tallies, []
        comparisons, self._comparisons = self._comparisons, {}
        minibatches = sorted(comparisons)
        metrics: dict[str, float] = {}
        for total in _over_processes(team, tallies):
            metrics |= total.metrics()
        compared = _over_processes(team, [comparisons[name] for name in minibatches]) if minibatches else []
        # `compared` is empty in all processes but the main one.
        for minibatch, comparison in zip(minibatches, compared, strict=False):
            metrics |= comparison.named(minibatch)
        return metrics

    def batch_gap(self) -> tuple[float, int]:
        """The sum of |Δ log-prob| between engine and trainer over the tokens of this process that can be compared, and
        their number, since the last call."""
        gap, self._batch_gap = self._batch_gap, None
        return (0.0, 0) if gap is None else (gap.sums.sum().item(), int(gap.count.sum()))

    def _gaps(self, policy_logps: torch.Tensor, inputs: dict[str, Any], version: int) -> list[EngineGap]:
        stamped = inputs["sampling_per_token_logps"], inputs["behavior_versions"]
        tensors = (policy_logps, *stamped, trained_mask(inputs))
        if not self._caches_are_kept:
            return [EngineGap.of_batch(*tensors, version=version, single_version=False)]
        return [
            EngineGap.of_batch(*tensors, version=version, single_version=True),
            EngineGap.of_kept_caches(*tensors, version=version),
        ]


def _over_processes(team: Team, tallies: list[TallyKind]) -> list[TallyKind]:
    """The sum of each tally over all processes, in the main process; empty in the others."""
    every = team.gather([tally.cpu() for tally in tallies])
    return [functools.reduce(operator.add, same) for same in zip(*every, strict=True)] if every else []
