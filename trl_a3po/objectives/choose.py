"""The objective that a config names, as the trainer applies it."""

import torch

from trl_a3po.config import A3POConfig
from trl_a3po.objectives.decoupled import decoupled_anchor
from trl_a3po.objectives.rivals import aipo_anchor, m2po_anchor, masked_is_anchor
from trl_a3po.objectives.scaled import asympo_anchor, spo_anchor
from trl_a3po.objectives.stats import Tally


def chosen_anchor(
    args: A3POConfig,
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    recomputed_logps: torch.Tensor | None,
    epsilon_low: float,
    epsilon_high: float,
) -> tuple[torch.Tensor, torch.Tensor, Tally]:
    """`(anchor_logps, weight, stats)` of `args.objective` for one micro-batch: both `(B, T)` and detached.

    Args:
        policy_logps, behavior_logps, staleness, mask: `(B, T)`.
        advantages: `(B,)`.
        recomputed_logps: `(B, T)`, those of a forward at take, where `args.recomputes_proximal`.
        epsilon_low, epsilon_high: the trust region.
    """
    tensors = (policy_logps, behavior_logps, staleness, advantages, mask)
    match args.objective:
        case "asympo":
            return asympo_anchor(*tensors, min_scale=args.asympo_min_scale)
        case "spo":
            return spo_anchor(*tensors, negative_scale=args.spo_negative_scale)
        case "masked_is":
            return masked_is_anchor(
                *tensors,
                recomputed_logps=recomputed_logps,
                lower=args.masked_is_lower,
                upper=args.masked_is_upper,
                epsilon_low=epsilon_low,
                epsilon_high=epsilon_high,
            )
        case "aipo":
            return aipo_anchor(*tensors, cap=args.aipo_cap)
        case "m2po":
            return m2po_anchor(*tensors, threshold=args.m2po_threshold)
        case "decoupled":
            return decoupled_anchor(
                *tensors,
                proximal_method=args.proximal_method,
                recomputed_logps=recomputed_logps,
                fresh=args.fresh_proximal,
                weight_cap=args.behavior_weight_cap,
                weight_mode=args.behavior_weight_mode,
                weight_level=args.behavior_weight_level,
                epsilon_low=epsilon_low,
                epsilon_high=epsilon_high,
            )
        case _:
            raise NotImplementedError(f"objective={args.objective!r} has no anchor here.")
