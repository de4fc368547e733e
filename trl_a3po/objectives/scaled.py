"""ASymPO and its baseline SPO (arXiv 2606.03070v1): objectives that need no behavior log-probs.

With `S_g = -(1/m_g)·Σ_i log π_θ(a_{g,i})`, the mean negative log-likelihood of the m_g tokens of row g, both minimise
the mean over rows of `A_g·C_g·S_g` and differ in the coefficient:

    ASymPO    C_g = 1 / sg(max(S_g, min_scale))
    SPO       C_g = 1 where A_g >= 0, else negative_scale

Guarantees: `C_g` carries no gradient. A row without tokens contributes 0 and still counts in the mean over rows.
"""

import torch

from trl_a3po.objectives.decoupled import anchor_outside
from trl_a3po.objectives.inputs import blank, check_shapes, row_mean, staleness_inside, upcast
from trl_a3po.objectives.stats import ScaleStats


def asympo_loss(
    policy_logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, min_scale: float = 1e-3
) -> tuple[torch.Tensor, ScaleStats]:
    """Mean over rows of `A·S/sg(max(S, min_scale))` (section 2.1 and appendix C of the paper).

    Where the floor does not bind, the gradient is that of the mean of `A·log S`, while the value is the mean
    advantage, about 0 for whole groups: watch the statistics, not the loss.

    Args:
        policy_logps: `lt`, `(B, T)`, with gradient.
        advantages: `A`, `(B,)`; for a balanced loss they sum to 0 over each group.
        mask: `(B, T)`, non-zero where a token counts.
        min_scale: the smallest scale divided by, in nats per token. Our default; the paper names none.

    Returns:
        The loss, a scalar, and the statistics.

    Raises:
        ValueError: `min_scale` is not above 0, shapes that do not match.
    """
    S, A, rows = _scale(policy_logps, advantages, mask)
    C = _asympo_coefficient(S, min_scale)
    return (A * C * S).mean(), _stats(S, A, C, rows, floor=S.lt(min_scale))


def spo_loss(
    policy_logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, negative_scale: float = 0.2
) -> tuple[torch.Tensor, ScaleStats]:
    """Mean over rows of `A·S`, negative advantages scaled by `negative_scale` (`α` of the paper, section 2.1).

    Args:
        policy_logps: `lt`, `(B, T)`, with gradient.
        advantages: `A`, `(B,)`.
        mask: `(B, T)`, non-zero where a token counts.
        negative_scale: from 0 (positive advantages only) to 1 (nothing scaled).

    Returns:
        The loss, a scalar, and the statistics.

    Raises:
        ValueError: `negative_scale` is outside [0, 1], shapes that do not match.
    """
    S, A, rows = _scale(policy_logps, advantages, mask)
    C = _spo_coefficient(A, negative_scale)
    return (A * C * S).mean(), _stats(S, A, C, rows)


@torch.no_grad()
def asympo_anchor(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    min_scale: float = 1e-3,
) -> tuple[torch.Tensor, torch.Tensor, ScaleStats]:
    """ASymPO as a clipped PPO loss sees it: `(lt, C_g)`, so that `r = 1` and never clips.

    The loss must be the mean over rows of each row's token mean (TRL: `loss_type="grpo"`).

    Args:
        policy_logps: `lt`, `(B, T)`.
        behavior_logps: not used.
        staleness: `(B, T)` integers, only for the statistics.
        advantages: `A`, `(B,)`.
        mask: `(B, T)`, non-zero where a token counts.
        min_scale: see `asympo_loss`.

    Returns:
        `lt` and `C_g`, `(B, T)`, detached, and the statistics by the staleness of each row's oldest token. Outside the
        mask `lt` is 0 where it is not finite.

    Raises:
        ValueError: `min_scale` is not above 0, a negative staleness, shapes that do not match.
    """
    S, A, rows = _scale(policy_logps, advantages, mask)
    C = _asympo_coefficient(S, min_scale)
    stats = _stats(S, A, C, rows, _oldest(staleness, mask), floor=S.lt(min_scale))
    return *_anchor(policy_logps, C, mask), stats


@torch.no_grad()
def spo_anchor(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    negative_scale: float = 0.2,
) -> tuple[torch.Tensor, torch.Tensor, ScaleStats]:
    """SPO as a clipped PPO loss sees it: `(lt, C_g)`. Everything else is as in `asympo_anchor`.

    Raises:
        ValueError: `negative_scale` is outside [0, 1], a negative staleness, shapes that do not match.
    """
    S, A, rows = _scale(policy_logps, advantages, mask)
    C = _spo_coefficient(A, negative_scale)
    return *_anchor(policy_logps, C, mask), _stats(S, A, C, rows, _oldest(staleness, mask))


def _scale(
    policy_logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`S` and `A`, `(B,)`, both 0 for a row without tokens, and which rows have tokens."""
    check_shapes(mask, advantages, policy_logps=policy_logps)
    mask = mask.bool()
    rows = mask.any(-1)
    (lt,) = blank(mask, *upcast(policy_logps))
    (A,) = blank(rows, advantages.to(lt.dtype))
    return -row_mean(lt, mask).squeeze(1), A, rows


def _asympo_coefficient(S: torch.Tensor, min_scale: float) -> torch.Tensor:
    if not min_scale > 0:
        raise ValueError(f"min_scale={min_scale} lets a scale of 0 divide by 0: set a positive floor, such as 1e-3.")
    return 1 / S.detach().clamp(min=min_scale)


def _spo_coefficient(A: torch.Tensor, negative_scale: float) -> torch.Tensor:
    if not 0 <= negative_scale <= 1:
        raise ValueError(
            f"negative_scale={negative_scale} would turn or amplify the negative rows, which SPO weakens: set a "
            "number from 0 to 1, such as 0.2."
        )
    return torch.where(A >= 0, torch.ones_like(A), negative_scale)


def _anchor(policy_logps: torch.Tensor, C: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (lt,) = upcast(policy_logps.detach())
    return anchor_outside(mask.bool(), lt, lt), C.unsqueeze(1).expand_as(lt)


def _oldest(staleness: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    check_shapes(mask, staleness=staleness)
    return staleness_inside(mask.bool(), staleness).amax(-1)


def _stats(
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
