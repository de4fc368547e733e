"""SPO (arXiv 2606.03070v1), the baseline of ASymPO: an objective that needs no behavior log-probs.

With `S_g = -(1/m_g)·Σ_i log π_θ(a_{g,i})`, the mean negative log-likelihood of the m_g tokens of row g, the loss is
the mean over rows of `A_g·C_g·S_g` with `C_g = 1` where `A_g >= 0`, and `C_g = negative_scale` elsewhere.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from trl_a3po.objectives.objective import Objective, SettingsOfObjective
from trl_a3po.objectives.row_scale import BALANCED, oldest_staleness, row_anchor, row_scale, scale_stats
from trl_a3po.objectives.stats import ScaleStats
from trl_a3po.protocol.ranges import Range


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
    S, A, rows = row_scale(policy_logps, advantages, mask)
    C = _spo_coefficient(A, negative_scale)
    return (A * C * S).mean(), scale_stats(S, A, C, rows)


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
    S, A, rows = row_scale(policy_logps, advantages, mask)
    C = _spo_coefficient(A, negative_scale)
    return *row_anchor(policy_logps, C, mask), scale_stats(S, A, C, rows, oldest_staleness(staleness, mask))


def _spo_coefficient(A: torch.Tensor, negative_scale: float) -> torch.Tensor:
    if not 0 <= negative_scale <= 1:
        raise ValueError(
            f"negative_scale={negative_scale} would turn or amplify the negative rows, which SPO weakens: set a "
            "number from 0 to 1, such as 0.2."
        )
    return torch.where(A >= 0, torch.ones_like(A), negative_scale)


SPO = Objective(
    name="spo",
    summary="negative rows scaled down",
    formula="`A·S` per row, negative `A` times `negative_scale`",
    paper="[arXiv 2606.03070](https://arxiv.org/abs/2606.03070)",
    anchor=spo_anchor,
    arguments={"spo_negative_scale": "negative_scale"},
    plan=lambda settings: f"negative advantages x {settings.spo_negative_scale:g}",
    needs=BALANCED,
)


@dataclass
class SPOSettings(SettingsOfObjective):
    _record: ClassVar[Objective] = SPO

    spo_negative_scale: Annotated[float, Range(least=0, most=1)] = field(
        default=0.2, metadata={"help": "Factor on negative advantages in SPO."}
    )
