"""The behavior weight `w`: what corrects for the policy that sampled a token being another than the proximal one.

Guarantees: the weight is detached and not negative; applying it and capping it are separate choices.
"""

import math
from typing import Literal

import torch

from trl_a3po.objectives.inputs import blank, check_option, check_shapes, row_mean, upcast
from trl_a3po.objectives.stats import DecoupledStats

WeightMode = Literal["truncate", "mask", "none"]
WeightLevel = Literal["token", "sequence"]
WEIGHT_MODES = ("truncate", "mask", "none")
WEIGHT_LEVELS = ("token", "sequence")


@torch.no_grad()
def behavior_weight(
    proximal_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    cap: float | None = 5.0,
    mode: WeightMode = "truncate",
    level: WeightLevel = "token",
) -> tuple[torch.Tensor, DecoupledStats]:
    """`w = exp(lp - lb)`, capped.

    Args:
        proximal_logps: `lp`, `(B, T)`.
        behavior_logps: `lb`, `(B, T)`.
        mask: `(B, T)`, non-zero where a token counts.
        cap: the largest weight, above 1; not used with `mode="none"`.
        mode: `"truncate"`: `min(w, cap)`; `"mask"`: 0 where `w > cap`, a weight of exactly `cap` is kept and the
            token still counts in every mean; `"none"`: `w` as it is.
        level: `"token"`: each token its own weight; `"sequence"`: the geometric mean of the row's weights, for every
            token of the row. The sequence weight belongs with the sequence-level ratio: only the product of the two
            geometric means is that of `ρ`.

    Returns:
        The weight to apply, `(B, T)`, detached (1 outside the mask at token level), and the statistics of `w` before
        the cap, with the fraction of tokens that the cap changed.

    Raises:
        ValueError: an unknown mode or level, a cap that is not above 1, shapes that do not match.
    """
    check_cap(cap, mode)
    check_shapes(mask, proximal_logps=proximal_logps, behavior_logps=behavior_logps)
    mask = mask.bool()
    lp, lb = blank(mask, *upcast(proximal_logps, behavior_logps))
    w = torch.exp(at_level(lp - lb, mask, level)).expand_as(lp)
    return apply_cap(w, cap, mode), DecoupledStats.of({"w": w, "capped": is_capped(w, cap, mode)}, mask)


def at_level(log_ratio: torch.Tensor, mask: torch.Tensor, level: WeightLevel) -> torch.Tensor:
    """Blanked `(B, T)` log-ratios -> themselves, or `(B, 1)`: the log of their geometric mean (GSPO, 2507.18071)."""
    check_option("level", level, WEIGHT_LEVELS)
    return log_ratio if level == "token" else row_mean(log_ratio, mask)


def apply_cap(w: torch.Tensor, cap: float | None, mode: WeightMode) -> torch.Tensor:
    if mode == "truncate":
        return w.clamp(max=cap)
    return torch.where(is_capped(w, cap, mode), 0, w)


def is_capped(w: torch.Tensor, cap: float | None, mode: WeightMode) -> torch.Tensor:
    return torch.zeros_like(w, dtype=torch.bool) if mode == "none" or cap is None else w > cap


def check_cap(cap: float | None, mode: WeightMode) -> None:
    """Raises `ValueError` for an unknown mode, or a cap that a capping mode cannot use."""
    check_option("mode", mode, WEIGHT_MODES)
    if mode != "none" and (cap is None or not math.isfinite(cap) or cap <= 1):
        raise ValueError(
            f"The behavior weight's cap is {cap}, but with mode={mode!r} it must be a finite number above 1, because "
            'tokens of an unchanged policy have weight 1: set such a cap, or mode="none" to apply the weight uncapped.'
        )
