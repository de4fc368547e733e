"""The decoupled objective: A-3PO's loss (arXiv 2512.06547), as a closed form and as the trainer's anchor.

Guarantees: the only path of the gradient is the current log-prob inside `r`; before any cap, `w·r = ρ`. So with
`loglinear` and no cap the gradient is that of PPO clipped on `ρ`, in the band `[(1 - ε_low)^D, (1 + ε_high)^D]` with
`D = max(d, 1)`: it widens with staleness, and a cap on `w` is therefore on by default.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch

from trl_a3po.objectives.behavior import WeightLevel, WeightMode, apply_cap, at_level, check_cap, is_capped
from trl_a3po.objectives.inputs import (
    anchor_outside,
    blank,
    check_option,
    check_shapes,
    checked_inputs,
    per_token,
    recomputed_inside,
    upcast,
)
from trl_a3po.objectives.objective import Need, Objective, SettingsOfObjective
from trl_a3po.objectives.proximal import (
    PROXIMAL_METHODS,
    TOKEN_LOSS_TYPES,
    ProximalMethod,
    ProximalSettings,
    proximal_logps,
)
from trl_a3po.objectives.staleness import Fresh, interpolation_weight
from trl_a3po.objectives.stats import DecoupledStats
from trl_a3po.protocol.ranges import Range


def decoupled_loss(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    proximal_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    weight_cap: float | None = 5.0,
    weight_mode: WeightMode = "truncate",
    weight_level: WeightLevel = "token",
) -> tuple[torch.Tensor, DecoupledStats]:
    """`-w · min(r·A, clip(r, 1 - ε_low, 1 + ε_high)·A)` for every token.

    Args:
        policy_logps: `lt`, `(B, T)`, with gradient.
        behavior_logps: `lb`, `(B, T)`.
        proximal_logps: `lp`, `(B, T)`, from the function of that name or from a forward at `take`.
        advantages: `A`, `(B,)` or `(B, T)`.
        mask: `(B, T)`, non-zero where a token counts.
        epsilon_low, epsilon_high: the clip band of `r`.
        weight_cap, weight_mode: how `w` is capped, see `behavior_weight`.
        weight_level: `"sequence"` replaces both `w` and `r` by the geometric mean over their row.

    Returns:
        The loss per token, `(B, T)`, 0 outside the mask, and the statistics.

    Raises:
        ValueError: an unknown mode or level, a cap that is not above 1, shapes that do not match.
    """
    check_cap(weight_cap, weight_mode)
    check_shapes(
        mask, advantages, policy_logps=policy_logps, behavior_logps=behavior_logps, proximal_logps=proximal_logps
    )
    mask = mask.bool()
    lt, lb, lp = blank(mask, *upcast(policy_logps, behavior_logps, proximal_logps.detach()))
    ratios = _ratios(lt, lb, lp, mask, weight_level)
    w = apply_cap(ratios["w"], weight_cap, weight_mode)
    r = torch.exp(at_level(lt - lp, mask, weight_level))
    A = per_token(advantages).to(lt.dtype)
    loss = -w * torch.min(r * A, r.clamp(1 - epsilon_low, 1 + epsilon_high) * A)

    events = _events(ratios, A, epsilon_low, epsilon_high, weight_cap, weight_mode)
    return torch.where(mask, loss, 0), DecoupledStats.of(ratios | events, mask)


@torch.no_grad()
def decoupled_anchor(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    proximal_method: ProximalMethod | Literal["recompute"] = "loglinear",
    recomputed_logps: torch.Tensor | None = None,
    fresh: Fresh = "behavior",
    weight_cap: float | None = 5.0,
    weight_mode: WeightMode = "truncate",
    weight_level: WeightLevel = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> tuple[torch.Tensor, torch.Tensor, DecoupledStats]:
    """A-3PO as a clipped PPO loss sees it: `(lp, w)`.

    Args:
        policy_logps, behavior_logps: `lt` and `lb`, `(B, T)`.
        staleness: `d`, `(B, T)` integers.
        advantages: `A`, `(B,)` or `(B, T)`; with the epsilons, only for the clip statistics.
        mask: `(B, T)`, non-zero where a token counts.
        proximal_method: a method of `proximal_logps`, or `"recompute"`.
        recomputed_logps: `(B, T)`, from a forward with the weights at `take`; with `"recompute"` and only then.
        fresh: the proximal policy at `d = 0`, see `interpolation_weight`.
        weight_cap, weight_mode: how `w` is capped, see `behavior_weight`.
        weight_level: `"sequence"` gives every token the geometric mean of its row's `w`; the PPO loss must then use
            the geometric mean of `r` as well (TRL: `importance_sampling_level="sequence"`).
        epsilon_low, epsilon_high: the clip band of that PPO loss.

    Returns:
        `lp` and `w`, `(B, T)`, detached, and the statistics by staleness. Outside the mask `lp` is the current
        log-prob where that is finite, else 0, so that the PPO ratio is 1 there.

    Raises:
        ValueError: an unknown option, `recomputed_logps` missing or superfluous, a cap that is not above 1, a negative
            staleness, shapes that do not match.
    """
    check_option("proximal_method", proximal_method, (*PROXIMAL_METHODS, "recompute"))
    check_cap(weight_cap, weight_mode)
    mask, lt, lb, d = checked_inputs(policy_logps, behavior_logps, staleness, advantages, mask)
    if (proximal_method == "recompute") != (recomputed_logps is not None):
        raise ValueError(
            f"recomputed_logps is {'None' if recomputed_logps is None else 'given'} with proximal_method="
            f"{proximal_method!r}: pass the log-probs of a forward pass with the weights at the take when, and only "
            'when, proximal_method="recompute".'
        )
    if proximal_method == "recompute":
        lp = recomputed_inside(mask, recomputed_logps, lt)
    else:
        lp = proximal_logps(lb, lt, d, proximal_method, fresh)
    ratios = _ratios(lt, lb, lp, mask, weight_level)
    w = apply_cap(ratios["w"], weight_cap, weight_mode)

    events = _events(ratios, per_token(advantages), epsilon_low, epsilon_high, weight_cap, weight_mode)
    if proximal_method in ("loglinear", "linear"):
        events["interpolation_weight"] = interpolation_weight(d, fresh)
    return anchor_outside(mask, lp, policy_logps), w, DecoupledStats.of(ratios | events, mask, d)


@torch.no_grad()
def _ratios(
    lt: torch.Tensor, lb: torch.Tensor, lp: torch.Tensor, mask: torch.Tensor, level: WeightLevel
) -> dict[str, torch.Tensor]:
    log_ratios = {"w": lp - lb, "r": lt - lp, "rho": lt - lb}
    return {name: torch.exp(at_level(log, mask, level)).expand_as(lt) for name, log in log_ratios.items()}


def _events(
    ratios: dict[str, torch.Tensor],
    A: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    cap: float | None,
    mode: WeightMode,
) -> dict[str, torch.Tensor]:
    """Where the clip removes the gradient, and where the cap changes the weight."""
    w, r = ratios["w"], ratios["r"]
    return {
        "clip_low": (r < 1 - epsilon_low) & (A < 0),
        "clip_high": (r > 1 + epsilon_high) & (A > 0),
        "capped": is_capped(w, cap, mode),
    }


def ratio_is_behavior_ratio(settings: "DecoupledSettings", staleness_bound: int) -> bool:
    """Whether `r = ρ` for every token: the anchor is the behavior policy, or no token is more than one step stale."""
    if settings.proximal_method == "behavior":
        return True
    interpolates = settings.proximal_method in ("loglinear", "linear")
    return interpolates and settings.fresh_proximal == "behavior" and staleness_bound <= 1


def _plan(settings: "DecoupledSettings") -> str:
    capped = f"{settings.behavior_weight_mode} at {settings.behavior_weight_cap:g}"
    cap = "no cap" if settings.behavior_weight_mode == "none" else capped
    return f"proximal policy {settings.proximal_method}, behavior weight: {cap}"


DECOUPLED = Objective(
    name="decoupled",
    summary="A-3PO: clipped PPO around a proximal policy, weighted by the behavior weight",
    formula="`-w · min(r·A, clip(r)·A)`",
    paper="[arXiv 2512.06547](https://arxiv.org/abs/2512.06547)",
    anchor=decoupled_anchor,
    arguments={
        "proximal_method": "proximal_method",
        "fresh_proximal": "fresh",
        "behavior_weight_cap": "weight_cap",
        "behavior_weight_mode": "weight_mode",
        "importance_sampling_level": "weight_level",  # the levels of w and r are one, or w·r would not be ρ
    },
    plan=_plan,
    needs=(
        Need("loss_type", (*TOKEN_LOSS_TYPES, "luspo"), "a loss type that does not shape the policy ratio itself"),
        Need("delta", (None,), "its own bound, behavior_weight_cap, as the only one on the policy ratio"),
    ),
    has_proximal_policy=True,
    ratio_is_behavior_ratio=ratio_is_behavior_ratio,
)


@dataclass
class DecoupledSettings(ProximalSettings, SettingsOfObjective):
    _record: ClassVar[Objective] = DECOUPLED

    fresh_proximal: Literal["behavior", "policy"] = field(
        default="behavior",
        metadata={
            "help": "Anchor of tokens of staleness 0. 'behavior' keeps the trust region for them; 'policy' removes "
            "it, and needs one optimizer step per batch."
        },
    )
    behavior_weight_cap: float = field(
        default=5.0, metadata={"help": "Largest behavior weight, above 1; see behavior_weight_mode."}
    )
    behavior_weight_mode: Literal["truncate", "mask", "none"] = field(
        default="truncate",
        metadata={
            "help": "What happens to behavior weights above the cap. 'truncate' lowers them to the cap; 'mask' gives "
            "the token weight 0; 'none' keeps them."
        },
    )
    compare_proximal_every: Annotated[int, Range(least=0)] = field(
        default=0,
        metadata={
            "help": "Optimizer steps between two comparisons of the log-linear anchor with the recomputed one, "
            "logged as a3po/compare/…. Each comparison costs a forward pass of one batch. 0 makes none."
        },
    )
