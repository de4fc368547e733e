"""The proximal policy: the anchor of the trust region, for the price of an interpolation.

Guarantees: the result carries no gradient; at interpolation weight 0 it is the behavior log-prob and at weight 1 the
current one, bit for bit.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch

from trl_a3po.objectives.inputs import check_option, upcast
from trl_a3po.objectives.staleness import Fresh, interpolation_weight_as

ProximalMethod = Literal["loglinear", "linear", "behavior", "reuse"]
PROXIMAL_METHODS = ("loglinear", "linear", "behavior", "reuse")

TOKEN_LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo")
"""TRL's loss types that bring no ratio or weight of their own and take weights of single tokens."""


@dataclass
class ProximalSettings:
    """The settings of objectives with a proximal policy."""

    proximal_method: Literal["loglinear", "linear", "behavior", "reuse", "recompute"] = field(
        default="loglinear",
        metadata={
            "help": "Anchor of the trust region. 'loglinear' interpolates log-probs (A-3PO, no forward pass); "
            "'linear' interpolates probabilities; 'behavior' is the policy that sampled the token; 'reuse' is the "
            "current policy (one optimizer step per batch); 'recompute' runs a forward pass when the batch is taken."
        },
    )


def proximal_logps(
    behavior_logps: torch.Tensor,
    policy_logps: torch.Tensor,
    staleness: torch.Tensor,
    method: ProximalMethod = "loglinear",
    fresh: Fresh = "behavior",
) -> torch.Tensor:
    """Log-probs of the proximal policy (A-3PO, arXiv 2512.06547), with `a` the `interpolation_weight` of the token.

    Args:
        behavior_logps: `lb`, `(B, T)`.
        policy_logps: `lt`, `(B, T)`.
        staleness: `d`, `(B, T)` integers.
        method: `"loglinear"`: `lb + a·(lt - lb)`, the geometric mean of the two policies;
            `"linear"`: `log((1 - a)·exp(lb) + a·exp(lt))`, the arithmetic mean;
            `"behavior"`: `lb`, which makes the loss PPO on behavior log-probs;
            `"reuse"`: `lt`, exact while the policy is still the one that took the batch.
        fresh: the proximal policy at `d = 0`, see `interpolation_weight`.

    Returns:
        `lp`, `(B, T)`, detached, fp32 or float64.
    """
    check_option("method", method, PROXIMAL_METHODS)
    lb, lt = upcast(behavior_logps.detach(), policy_logps.detach())
    if method == "behavior":
        return lb
    if method == "reuse":
        return lt
    a = interpolation_weight_as(lt.dtype, staleness, fresh)
    if method == "loglinear":
        return torch.lerp(lb, lt, a)
    return torch.logaddexp(torch.log1p(-a) + lb, torch.log(a) + lt)
