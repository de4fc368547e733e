"""Does a packed forward of a model give the log-probs of its padded forward? Checked once, on the first batch.

Guarantees: the same number of forwards on every rank and for every batch; no dropout, no gradients; the model is left
as it was. The padded forward runs twice, the second time with wider padding, which shows what rounding alone does to
this model in this dtype; the tolerance is a multiple of that, and no less than a floor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trl_a3po.models.eval_mode import eval_mode

MAX_ROWS = 4
EXTRA_PADDING = 8
# Distances of log-probs that rounding may cause in any model: mean, max.
FLOORS = {"full": (1e-4, 1e-2), "half": (0.03, 1.0)}
SPREAD_FACTOR = 5.0

# (input_ids, attention_mask) -> log-probs (B, T)
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """Distances of log-probs from those of the padded forward, as mean and max.

    Args:
        name: the layout that was compared.
        found: its distance.
        spread: distance of two padded forwards.
        floor: least tolerance.
    """

    name: str
    found: tuple[float, float]
    spread: tuple[float, float]
    floor: tuple[float, float]

    @property
    def allowed(self) -> tuple[float, float]:
        mean, largest = (max(low, SPREAD_FACTOR * seen) for low, seen in zip(self.floor, self.spread, strict=True))
        return mean, largest

    @property
    def holds(self) -> bool:
        return all(found <= most for found, most in zip(self.found, self.allowed, strict=True))  # false for NaN

    def __str__(self) -> str:
        return (
            f"{self.name}: log-probs differ from the padded forward's by {self.found[0]:.2g} on average and "
            f"{self.found[1]:.2g} at most, where {self.allowed[0]:.2g} and {self.allowed[1]:.2g} are allowed"
        )


def check_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows to check: the first prompt with the completions of the first few rows, so that there is a prompt to
    share, and the last row as it is. Each row has at least one completion token."""
    split = input_ids.shape[1] - completion_width
    rows = slice(0, min(MAX_ROWS, len(input_ids)))
    ids, mask = input_ids[rows].clone(), attention_mask[rows].clone()
    ids[:, :split], mask[:, :split] = input_ids[0, :split], attention_mask[0, :split]
    ids, mask = torch.cat([ids, ids[:1], input_ids[-1:]]), torch.cat([mask, mask[:1], attention_mask[-1:]])
    mask[:, split] = 1
    return ids, mask


@torch.no_grad()
def compare_forwards(
    model: torch.nn.Module,
    padded: Forward,
    others: dict[str, Forward],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    *,
    half: bool,
) -> list[Verdict]:
    """Compare each of `others` with `padded`.

    Args:
        model: the model that all of them run; its dropout is off during the comparison.
        half: the forward runs in half precision, or with matrix products of reduced precision.
    """
    scored = attention_mask[:, -completion_width:].bool()
    wider = torch.zeros_like(attention_mask[:, :1]).expand(-1, EXTRA_PADDING)
    with eval_mode(model):
        expected = padded(input_ids, attention_mask)
        again = padded(torch.cat([wider, input_ids], 1), torch.cat([wider, attention_mask], 1))
        found = {name: forward(input_ids, attention_mask) for name, forward in others.items()}
    spread = _distance(again, expected, scored)
    floor = FLOORS["half" if half else "full"]
    return [Verdict(name, _distance(logps, expected, scored), spread, floor) for name, logps in found.items()]


def _distance(logps: torch.Tensor, expected: torch.Tensor, scored: torch.Tensor) -> tuple[float, float]:
    distance = (logps - expected).abs()[scored]
    return distance.mean().item(), distance.max().item()
