"""AIPO (LlamaRL, arXiv 2505.24034), as a clipped PPO loss sees it.

With `ρ = exp(lt - lb)`, the gradient of a token is that of `-sg(min(ρ, cap)) · A · lt`. The equation is taken from
secondary sources.

Guarantees: anchor and weight are detached. The anchor is the current policy, so that `r = 1` and the clip of the PPO
loss never binds; staleness changes nothing but the columns of the statistics.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from trl_a3po.objectives.inputs import anchor_outside, checked_inputs
from trl_a3po.objectives.objective import Need, Objective, SettingsOfObjective
from trl_a3po.objectives.proximal import TOKEN_LOSS_TYPES
from trl_a3po.objectives.stats import DecoupledStats
from trl_a3po.protocol.ranges import Range


@torch.no_grad()
def aipo_anchor(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    cap: float = 4.0,
) -> tuple[torch.Tensor, torch.Tensor, DecoupledStats]:
    """AIPO: `(lt, min(ρ, cap))`, which is CISPO on the behavior ratio (arXiv 2505.24034).

    Args:
        policy_logps, behavior_logps, staleness, advantages, mask: as in `masked_is_anchor`.
        cap: the largest weight, above 1. The default is our choice.

    Returns:
        Anchor and weight, `(B, T)`, detached, and the statistics by staleness, where `w` is `ρ` before the cap.

    Raises:
        ValueError: a cap that is not above 1, a negative staleness, shapes that do not match.
    """
    if not (math.isfinite(cap) and cap > 1):
        raise ValueError(
            f"cap={cap} must be a finite number above 1, because tokens of an unchanged policy have weight 1: set "
            "such a cap, for example 4.0."
        )
    mask, lt, lb, d = checked_inputs(policy_logps, behavior_logps, staleness, advantages, mask)
    rho = torch.exp(lt - lb)
    return (
        anchor_outside(mask, lt, policy_logps),
        rho.clamp(max=cap),
        DecoupledStats.unclipped(rho, mask, d, weight=rho, capped=rho > cap),
    )


AIPO = Objective(
    name="aipo",
    summary="truncated importance sampling (CISPO on the behavior ratio)",
    formula="`-sg(min(ρ, cap)) · A · lt`",
    paper="[arXiv 2505.24034](https://arxiv.org/abs/2505.24034)",
    anchor=aipo_anchor,
    arguments={"aipo_cap": "cap"},
    plan=lambda settings: f"behavior ratio at most {settings.aipo_cap:g}",
    needs=(
        Need("loss_type", TOKEN_LOSS_TYPES, "a loss type without a ratio or weight of its own"),
        Need("importance_sampling_level", ("token",), "weights of single tokens"),
        Need("delta", (None,), "its own bound, aipo_cap, as the only one on the policy ratio"),
    ),
)


@dataclass
class AIPOSettings(SettingsOfObjective):
    _record: ClassVar[Objective] = AIPO

    aipo_cap: Annotated[float, Range(above=1)] = field(default=4.0, metadata={"help": "Largest weight of AIPO."})
