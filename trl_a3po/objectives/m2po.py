"""M2PO (arXiv 2510.01161), as a clipped PPO loss sees it.

With `ρ = exp(lt - lb)`, the gradient of a token is that of `-sg(ρ·kept) · A · lt`, where the tokens are kept so that
`mean(log²ρ) ≤ threshold`. The equation is taken from secondary sources.

Guarantees: anchor and weight are detached; a token that is dropped has weight 0 and still counts in every mean. The
anchor is the current policy, so that `r = 1` and the clip of the PPO loss never binds; staleness changes nothing but
the columns of the statistics.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from trl_a3po.objectives.inputs import anchor_outside, checked_inputs
from trl_a3po.objectives.objective import Need, Objective, SettingsOfObjective
from trl_a3po.objectives.proximal import TOKEN_LOSS_TYPES
from trl_a3po.objectives.stats import DecoupledStats
from trl_a3po.protocol.ranges import Range


@torch.no_grad()
def m2po_anchor(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    threshold: float = 0.04,
) -> tuple[torch.Tensor, torch.Tensor, DecoupledStats]:
    """M2PO: `(lt, ρ·kept)`: the tokens of largest `log²ρ` are dropped until its mean over the rest is at most
    `threshold` (arXiv 2510.01161).

    The mean is over the tokens given, which in training are those of a micro-batch of one process.

    Args:
        policy_logps, behavior_logps, staleness, advantages, mask: as in `masked_is_anchor`.
        threshold: `τ`, above 0.

    Returns:
        Anchor and weight, `(B, T)`, detached, and the statistics by staleness, where `w` is `ρ` and `w/capped` the
        fraction dropped. Of tokens with equal `log²ρ`, those of later rows and positions are dropped first.

    Raises:
        ValueError: a threshold that is not above 0, a negative staleness, shapes that do not match.
    """
    if not threshold > 0:
        raise ValueError(f"threshold={threshold} would drop every token that moved: set a number above 0, as 0.04.")
    mask, lt, lb, d = checked_inputs(policy_logps, behavior_logps, staleness, advantages, mask)
    rho = torch.exp(lt - lb)
    kept = _kept_second_moment(lt - lb, mask, threshold)
    return (
        anchor_outside(mask, lt, policy_logps),
        torch.where(kept, rho, 0),
        DecoupledStats.unclipped(rho, mask, d, weight=rho, capped=~kept),
    )


def _kept_second_moment(log_ratio: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
    """The most tokens, smallest `log²ρ` first, whose mean is at most `threshold`: running means of sorted values only
    grow, so the tokens kept are a prefix."""
    squares = log_ratio[mask].square()
    order = squares.sort(stable=True).indices
    counts = torch.arange(1, len(squares) + 1, device=squares.device, dtype=squares.dtype)
    kept = torch.empty_like(squares, dtype=torch.bool)
    kept[order] = squares[order].cumsum(0) / counts <= threshold
    return torch.zeros_like(mask).masked_scatter(mask, kept)


M2PO = Objective(
    name="m2po",
    summary="the tokens that moved most are dropped, by the second moment of the log-ratio",
    formula="`-sg(ρ·kept) · A · lt`, `mean(log²ρ) ≤ threshold`",
    paper="[arXiv 2510.01161](https://arxiv.org/abs/2510.01161)",
    anchor=m2po_anchor,
    arguments={"m2po_threshold": "threshold"},
    plan=lambda settings: f"second moment at most {settings.m2po_threshold:g}",
    needs=(
        Need("loss_type", TOKEN_LOSS_TYPES, "a loss type without a ratio or weight of its own"),
        Need("importance_sampling_level", ("token",), "weights of single tokens"),
        Need("delta", (None,), "its own bound, m2po_threshold, as the only one on the policy ratio"),
        Need("schedule", ("sync", "async", "fixed_lag"), "micro-batches that do not depend on which groups end first"),
    ),
)


@dataclass
class M2POSettings(SettingsOfObjective):
    _record: ClassVar[Objective] = M2PO

    m2po_threshold: Annotated[float, Range(above=0)] = field(
        default=0.04,
        metadata={"help": "Largest mean of log²ρ, the squared log of the behavior ratio, over the tokens M2PO keeps."},
    )
