"""Rivals of the decoupled objective: masked IS (IcePop), AIPO and M2PO, as a clipped PPO loss sees them.

With `lb`, `lt` and `lp` the behavior, current and proximal log-probs, `ρ = exp(lt - lb)` and `w = exp(lp - lb)`:

    masked IS   w·1[lower ≤ w ≤ upper] · min(r·A, clip(r, 1 - ε_low, 1 + ε_high)·A)     (Ring-1T, arXiv 2510.18855)
    AIPO        sg(min(ρ, cap)) · A · lt                                                (LlamaRL, arXiv 2505.24034)
    M2PO        sg(ρ·kept) · A · lt, the tokens kept so that mean(log²ρ) ≤ τ            (arXiv 2510.01161)

Guarantees: anchor and weight are detached; a token that is masked or dropped has weight 0 and still counts in every
mean; staleness changes nothing but the columns of the statistics. AIPO and M2PO anchor on the current policy, so that
`r = 1` and the clip of the PPO loss never binds. The equations of AIPO and M2PO are taken from secondary sources.
"""

import math

import torch

from trl_a3po.objectives.decoupled import anchor_outside
from trl_a3po.objectives.inputs import blank, check_shapes, staleness_inside, upcast
from trl_a3po.objectives.stats import DecoupledStats

Anchor = tuple[torch.Tensor, torch.Tensor, DecoupledStats]


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
) -> Anchor:
    """Masked importance sampling, IcePop: `(lp, w·1[lower ≤ w ≤ upper])` (arXiv 2510.18855).

    Args:
        policy_logps, behavior_logps: `lt` and `lb`, `(B, T)`.
        staleness: `d`, `(B, T)` integers, only for the statistics.
        advantages: `A`, `(B,)`; with the epsilons, only for the clip statistics.
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
    mask, lt, lb, d = _inputs(policy_logps, behavior_logps, staleness, advantages, mask)
    lp = lt
    if recomputed_logps is not None:
        check_shapes(mask, recomputed_logps=recomputed_logps)
        (lp,) = blank(mask, recomputed_logps.to(lt.dtype))
    w, r = torch.exp(lp - lb), torch.exp(lt - lp)
    kept = (w >= lower) & (w <= upper)
    A = advantages.unsqueeze(1)
    clip = {
        "clip_low": (r < 1 - epsilon_low) & (A < 0),
        "clip_high": (r > 1 + epsilon_high) & (A > 0),
    }
    values = {"w": w, "r": r, "rho": torch.exp(lt - lb), **clip, "capped": ~kept}
    return anchor_outside(mask, lp, policy_logps), torch.where(kept, w, 0), DecoupledStats.of(values, mask, d)


@torch.no_grad()
def aipo_anchor(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    cap: float = 4.0,
) -> Anchor:
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
    mask, lt, lb, d = _inputs(policy_logps, behavior_logps, staleness, advantages, mask)
    rho = torch.exp(lt - lb)
    return anchor_outside(mask, lt, policy_logps), rho.clamp(max=cap), _unclipped(rho, rho > cap, mask, d)


@torch.no_grad()
def m2po_anchor(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    threshold: float = 0.04,
) -> Anchor:
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
    mask, lt, lb, d = _inputs(policy_logps, behavior_logps, staleness, advantages, mask)
    rho = torch.exp(lt - lb)
    kept = _kept_second_moment(lt - lb, mask, threshold)
    return anchor_outside(mask, lt, policy_logps), torch.where(kept, rho, 0), _unclipped(rho, ~kept, mask, d)


def _kept_second_moment(log_ratio: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
    """The most tokens, smallest `log²ρ` first, whose mean is at most `threshold`: running means of sorted values only
    grow, so the tokens kept are a prefix."""
    squares = log_ratio[mask].square()
    order = squares.sort(stable=True).indices
    counts = torch.arange(1, len(squares) + 1, device=squares.device, dtype=squares.dtype)
    kept = torch.empty_like(squares, dtype=torch.bool)
    kept[order] = squares[order].cumsum(0) / counts <= threshold
    return torch.zeros_like(mask).masked_scatter(mask, kept)


def _inputs(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The boolean mask, and `lt`, `lb` and `d`, blanked outside of it."""
    check_shapes(mask, advantages, policy_logps=policy_logps, behavior_logps=behavior_logps, staleness=staleness)
    mask = mask.bool()
    return mask, *blank(mask, *upcast(policy_logps, behavior_logps)), staleness_inside(mask, staleness)


def _unclipped(rho: torch.Tensor, changed: torch.Tensor, mask: torch.Tensor, d: torch.Tensor) -> DecoupledStats:
    never = torch.zeros_like(mask)
    values = {"w": rho, "r": torch.ones_like(rho), "rho": rho, "clip_low": never, "clip_high": never}
    return DecoupledStats.of({**values, "capped": changed}, mask, d)
