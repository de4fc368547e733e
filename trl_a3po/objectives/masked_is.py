"""Masked importance sampling (IcePop, Ring-1T, arXiv 2510.18855), as a clipped PPO loss sees it.

With `w = exp(lp - lb)` and `r = exp(lt - lp)`, the loss of a token is

    -w·1[lower ≤ w ≤ upper] · min(r·A, clip(r, 1 - ε_low, 1 + ε_high)·A)

Guarantees: anchor and weight are detached; a token that is masked has weight 0 and still counts in every mean;
staleness changes nothing but the columns of the statistics.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from trl_a3po.objectives.inputs import anchor_outside, checked_inputs, per_token, recomputed_inside
from trl_a3po.objectives.objective import Need, Objective, SettingsOfObjective
from trl_a3po.objectives.proximal import TOKEN_LOSS_TYPES, ProximalSettings
from trl_a3po.objectives.stats import DecoupledStats
from trl_a3po.protocol.ranges import Range


@torch.no_grad()
def masked_is_anchor(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    recomputed_logps: torch.Tensor | None = None,
    lower: float = 0.5,
    upper: float = 5.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> tuple[torch.Tensor, torch.Tensor, DecoupledStats]:
    """Masked importance sampling, IcePop: `(lp, w·1[lower ≤ w ≤ upper])` (arXiv 2510.18855).

    Args:
        policy_logps, behavior_logps: `lt` and `lb`, `(B, T)`.
        staleness: `d`, `(B, T)` integers, only for the statistics.
        advantages: `A`, `(B,)` or `(B, T)`; with the epsilons, only for the clip statistics.
        mask: `(B, T)`, non-zero where a token counts.
        recomputed_logps: `lp`, `(B, T)`, from a forward with the weights at `take`. None takes the current policy,
            which is the same at the only optimizer step of a batch.
        lower, upper: the weights kept, both bounds included; `0 ≤ lower < 1 < upper`.
        epsilon_low, epsilon_high: the clip band of the PPO loss.

    Returns:
        Anchor and weight, `(B, T)`, detached, and the statistics by staleness, where `w/capped` is the fraction
        masked.

    Raises:
        ValueError: bounds that do not surround 1, a negative staleness, shapes that do not match.
    """
    if not 0 <= lower < 1 < upper:
        raise ValueError(
            f"lower={lower} and upper={upper} would mask tokens whose policies agree (w = 1): set a lower bound from "
            "0 to below 1 and an upper one above 1, such as 0.5 and 5.0."
        )
    mask, lt, lb, d = checked_inputs(policy_logps, behavior_logps, staleness, advantages, mask)
    lp = recomputed_inside(mask, recomputed_logps, lt)
    w, r = torch.exp(lp - lb), torch.exp(lt - lp)
    kept = (w >= lower) & (w <= upper)
    A = per_token(advantages)
    clip = {
        "clip_low": (r < 1 - epsilon_low) & (A < 0),
        "clip_high": (r > 1 + epsilon_high) & (A > 0),
    }
    values = {"w": w, "r": r, "rho": torch.exp(lt - lb), **clip, "capped": ~kept}
    return anchor_outside(mask, lp, policy_logps), torch.where(kept, w, 0), DecoupledStats.of(values, mask, d)


MASKED_IS = Objective(
    name="masked_is",
    summary="masked importance sampling (IcePop)",
    formula="`-w·1[lower ≤ w ≤ upper] · min(r·A, clip(r)·A)`",
    paper="[arXiv 2510.18855](https://arxiv.org/abs/2510.18855)",
    anchor=masked_is_anchor,
    arguments={"masked_is_lower": "lower", "masked_is_upper": "upper"},
    plan=lambda settings: (
        f"proximal policy {settings.proximal_method}, weights {settings.masked_is_lower:g} to "
        f"{settings.masked_is_upper:g}"
    ),
    needs=(
        Need("loss_type", TOKEN_LOSS_TYPES, "a loss type without a ratio or weight of its own"),
        Need("importance_sampling_level", ("token",), "weights of single tokens"),
        Need("delta", (None,), "its own bound, masked_is_upper, as the only one on the policy ratio"),
        Need("proximal_method", ("reuse", "recompute"), "the policy at the take as its proximal policy"),
    ),
    has_proximal_policy=True,
)


@dataclass
class MaskedISSettings(ProximalSettings, SettingsOfObjective):
    _record: ClassVar[Objective] = MASKED_IS

    masked_is_lower: Annotated[float, Range(least=0, below=1)] = field(
        default=0.5, metadata={"help": "Smallest behavior weight that masked importance sampling keeps."}
    )
    masked_is_upper: Annotated[float, Range(above=1)] = field(
        default=5.0, metadata={"help": "Largest behavior weight that masked importance sampling keeps."}
    )
