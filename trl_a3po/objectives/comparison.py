"""The interpolated anchor beside the recomputed one, on the same tokens.

Guarantees: measures only; nothing here reaches the loss.
"""

from typing import Self

import torch

from trl_a3po.objectives.inputs import blank, check_shapes, per_token, staleness_inside, upcast
from trl_a3po.objectives.stats import Tally


class ProximalComparison(Tally):
    """Per token: the gap `|lp - lp'|` in nats between the anchor used and the recomputed one, and `w`, `r` and the
    fraction of clipped tokens under either; names with `recomputed` are those of `lp'`. No cap is applied to `w`."""

    @classmethod
    @torch.no_grad()
    def of_batch(
        cls,
        policy_logps: torch.Tensor,
        behavior_logps: torch.Tensor,
        staleness: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        *,
        proximal_logps: torch.Tensor,
        recomputed_logps: torch.Tensor,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
    ) -> Self:
        """Compare `proximal_logps` with `recomputed_logps`; `(B, T)` all but `advantages`, `(B,)`.

        Raises:
            ValueError: a negative staleness, shapes that do not match.
        """
        check_shapes(mask, advantages, policy_logps=policy_logps, behavior_logps=behavior_logps, staleness=staleness)
        check_shapes(mask, proximal_logps=proximal_logps, recomputed_logps=recomputed_logps)
        mask, A = mask.bool(), per_token(advantages)
        tensors = upcast(policy_logps, behavior_logps, proximal_logps, recomputed_logps)
        lt, lb, lp, recomputed = blank(mask, *tensors)
        values = {"gap": (lp - recomputed).abs()}
        for suffix, anchor in (("", lp), ("_recomputed", recomputed)):
            r = torch.exp(lt - anchor)
            clipped = ((r < 1 - epsilon_low) & (A < 0)) | ((r > 1 + epsilon_high) & (A > 0))
            values |= {f"w{suffix}": torch.exp(anchor - lb), f"r{suffix}": r, f"clipped{suffix}": clipped}
        return cls.of(values, mask, staleness_inside(mask, staleness))

    def named(self, minibatch: str) -> dict[str, float]:
        """The metrics as `a3po/compare/<minibatch>/…`, without those of staleness itself."""
        metrics = {key.removeprefix("a3po/"): value for key, value in self.metrics().items()}
        return {f"a3po/compare/{minibatch}/{k}": v for k, v in metrics.items() if not k.startswith("staleness/")}

    def _summary(self, column: int) -> dict[str, float]:
        entries = self._column(column)
        metrics = entries.spread("gap")
        for suffix in ("", "_recomputed"):
            metrics |= entries.spread(f"w{suffix}") | entries.spread(f"r{suffix}")
            metrics[f"clipped{suffix}"] = entries.mean(f"clipped{suffix}")
        return metrics
