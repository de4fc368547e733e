"""What ASymPO and SPO share (arXiv 2606.03070v1): objectives on the mean negative log-likelihood of each row.

With `S_g = -(1/m_g)·Σ_i log π_θ(a_{g,i})` over the m_g tokens of row g, both minimise the mean over rows of
`A_g·C_g·S_g` and differ in the coefficient `C_g`.

Guarantees: `C_g` carries no gradient. A row without tokens contributes 0 and still counts in the mean over rows.
"""

import torch

from trl_a3po.objectives.inputs import anchor_outside, blank, check_shapes, row_mean, staleness_inside, upcast
from trl_a3po.objectives.objective import Need
from trl_a3po.objectives.stats import ScaleStats

BALANCED = (
    Need("loss_type", ("grpo",), "the mean over each completion, then over completions"),
    Need("importance_sampling_level", ("token",), "no ratio at all"),
    Need("scale_rewards", ("none",), "advantages that are only centred"),
    Need("multi_objective_aggregation", ("sum_then_normalize",), "advantages centred within their group"),
    Need("mask_truncated_completions", (False,), "every completion of a group"),
    Need("top_entropy_quantile", (1.0,), "every token of a completion"),
    Need("off_policy_mask_threshold", (None,), "every completion of a group"),
    Need("delta", (None,), "no ratio at all"),
)
"""Both objectives rest on the sum of a group's advantages being zero."""


def row_scale(
    policy_logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`S` and `A`, `(B,)`, both 0 for a row without tokens, and which rows have tokens."""
    check_shapes(mask, advantages, policy_logps=policy_logps)
    if advantages.dim() != 1:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}, but this objective scales a row by its one advantage: "
            "pass (B,), or set objective='decoupled' for an advantage per token."
        )
    mask = mask.bool()
    rows = mask.any(-1)
    (lt,) = blank(mask, *upcast(policy_logps))
    (A,) = blank(rows, advantages.to(lt.dtype))
    return -row_mean(lt, mask).squeeze(1), A, rows


def row_anchor(policy_logps: torch.Tensor, C: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (lt,) = upcast(policy_logps.detach())
    return anchor_outside(mask.bool(), lt, lt), C.unsqueeze(1).expand_as(lt)


def oldest_staleness(staleness: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    check_shapes(mask, staleness=staleness)
    return staleness_inside(mask.bool(), staleness).amax(-1)


def scale_stats(
    S: torch.Tensor,
    A: torch.Tensor,
    C: torch.Tensor,
    rows: torch.Tensor,
    staleness: torch.Tensor | None = None,
    **events: torch.Tensor,
) -> ScaleStats:
    positive, negative = A.clamp(min=0), (-A).clamp(min=0)
    values = {
        "scale": S,
        "coefficient": C,
        "positive": positive * S,
        "negative": negative * S,
        "positive_advantage": positive,
        "negative_advantage": negative,
    }
    return ScaleStats.of(values | events, rows, staleness)
