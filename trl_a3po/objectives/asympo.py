"""ASymPO (arXiv 2606.03070v1), an objective that needs no behavior log-probs.

With `S_g = -(1/m_g)·Σ_i log π_θ(a_{g,i})`, the mean negative log-likelihood of the m_g tokens of row g, the loss is
the mean over rows of `A_g·C_g·S_g` with `C_g = 1 / sg(max(S_g, min_scale))`.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from trl_a3po.objectives.objective import Objective, SettingsOfObjective
from trl_a3po.objectives.row_scale import BALANCED, oldest_staleness, row_anchor, row_scale, scale_stats
from trl_a3po.objectives.stats import ScaleStats
from trl_a3po.protocol.ranges import Range


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
    S, A, rows = row_scale(policy_logps, advantages, mask)
    C = _asympo_coefficient(S, min_scale)
    return (A * C * S).mean(), scale_stats(S, A, C, rows, floor=S.lt(min_scale))


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
    S, A, rows = row_scale(policy_logps, advantages, mask)
    C = _asympo_coefficient(S, min_scale)
    stats = scale_stats(S, A, C, rows, oldest_staleness(staleness, mask), floor=S.lt(min_scale))
    return *row_anchor(policy_logps, C, mask), stats


def _asympo_coefficient(S: torch.Tensor, min_scale: float) -> torch.Tensor:
    if not min_scale > 0:
        raise ValueError(f"min_scale={min_scale} lets a scale of 0 divide by 0: set a positive floor, such as 1e-3.")
    return 1 / S.detach().clamp(min=min_scale)


ASYMPO = Objective(
    name="asympo",
    summary="rows scaled by their own negative log-likelihood",
    formula="`A·S / sg(max(S, min_scale))` per row",
    paper="[arXiv 2606.03070](https://arxiv.org/abs/2606.03070)",
    anchor=asympo_anchor,
    arguments={"asympo_min_scale": "min_scale"},
    plan=lambda settings: f"scale at least {settings.asympo_min_scale:g}",
    needs=BALANCED,
)


@dataclass
class AsympoSettings(SettingsOfObjective):
    _record: ClassVar[Objective] = ASYMPO

    asympo_min_scale: Annotated[float, Range(above=0)] = field(
        default=1e-3,
        metadata={"help": "Floor of the scale that ASymPO divides by: the mean negative log-prob of a row's tokens."},
    )
