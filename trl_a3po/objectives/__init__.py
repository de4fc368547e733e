"""The objectives: pure functions on tensors, with no trainer, no threads and no I/O.

Guarantees, for every function of this package: it computes in fp32 or better (float64 stays float64); positions
outside `mask` may hold anything, NaN and infinities included, and change neither values, gradients nor statistics.

Log-probs of one token, as in the A-3PO paper (arXiv 2512.06547): `lb` under the behavior policy that sampled it, `lp`
under the proximal policy that anchors the trust region, `lt` under the current policy. `d` is the token's staleness,
and

    w = exp(lp - lb)        behavior weight, detached
    r = exp(lt - lp)        PPO ratio, the only path of the gradient
    ρ = exp(lt - lb) = w·r

The trainer uses an objective through its anchor function, `(policy_logps, behavior_logps, staleness, advantages, mask)
-> (anchor_logps, weight, stats)`: a clipped PPO loss given `old_per_token_logps = anchor_logps` and the per-token
advantages `A·weight` has the gradient of the objective. The `*_loss` functions are the closed forms, for comparison.
"""

from trl_a3po.objectives.aipo import aipo_anchor
from trl_a3po.objectives.asympo import asympo_anchor, asympo_loss
from trl_a3po.objectives.behavior import behavior_weight
from trl_a3po.objectives.comparison import ProximalComparison
from trl_a3po.objectives.decoupled import decoupled_anchor, decoupled_loss
from trl_a3po.objectives.m2po import m2po_anchor
from trl_a3po.objectives.masked_is import masked_is_anchor
from trl_a3po.objectives.proximal import proximal_logps
from trl_a3po.objectives.spo import spo_anchor, spo_loss
from trl_a3po.objectives.staleness import interpolation_weight, token_staleness
from trl_a3po.objectives.stats import DecoupledStats, ScaleStats
from trl_a3po.objectives.table import OBJECTIVES

__all__ = [
    "OBJECTIVES",
    "DecoupledStats",
    "ProximalComparison",
    "ScaleStats",
    "aipo_anchor",
    "asympo_anchor",
    "asympo_loss",
    "behavior_weight",
    "decoupled_anchor",
    "decoupled_loss",
    "interpolation_weight",
    "m2po_anchor",
    "masked_is_anchor",
    "proximal_logps",
    "spo_anchor",
    "spo_loss",
    "token_staleness",
]
