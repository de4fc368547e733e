"""Is a packed forward of this model what its padded forward is? Asked once, of the first batch.

Guarantees: the same number of forwards on every rank and for every batch; no dropout, no gradients; the model is left
as it was. The padded forward is run twice, the second time with wider padding, so that the tolerance is what rounding
alone does to this model in this dtype, and never less than a floor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

MOST_ROWS = 4
EXTRA_PADDING = 8
# Largest distance of log-probs that is put down to rounding: mean, max.
FLOORS = {"full": (1e-4, 1e-2), "half": (0.03, 1.0)}
SPREADS = 5.0

# (input_ids, attention_mask) -> log-probs (B, T)
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """Distances of log-probs from the padded forward's, as mean and max; `spread`: of two padded forwards."""

    name: str
    found: tuple[float, float]
    spread: tuple[float, float]
    floor: tuple[float, float]

    @property
    def allowed(self) -> tuple[float, float]:
        return tuple(max(low, SPREADS * seen) for low, seen in zip(self.floor, self.spread, strict=True))

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
    """Rows to check on, of any batch: the first prompt with the completions of the first few rows, so that there is a
    prompt to share, and the last row as it is. Each has at least one completion token."""
    split = input_ids.shape[1] - completion_width
    rows = slice(0, min(MOST_ROWS, len(input_ids)))
    ids, mask = input_ids[rows].clone(), attention_mask[rows].clone()
    ids[:, :split], mask[:, :split] = input_ids[0, :split], attention_mask[0, :split]
    ids, mask = torch.cat([ids, ids[:1], input_ids[-1:]]), torch.cat([mask, mask[:1], attention_mask[-1:]])
    mask[:, split] = 1
    return ids, mask


@torch.no_grad()
def verdicts(
    model: torch.nn.Module,
    padded: Forward,
    others: dict[str, Forward],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    *,
    half: bool,
) -> list[Verdict]:
    """Hold each of `others` against `padded`.

    Args:
        model: whose dropout is off meanwhile.
        half: the forward runs in half precision, or with matrix products of reduced precision.
    """
    scored = attention_mask[:, -completion_width:].bool()
    wider = torch.zeros_like(attention_mask[:, :1]).expand(-1, EXTRA_PADDING)
    with _eval(model):
        expected = padded(input_ids, attention_mask)
        again = padded(torch.cat([wider, input_ids], 1), torch.cat([wider, attention_mask], 1))
        found = {name: forward(input_ids, attention_mask) for name, forward in others.items()}
    spread = _distance(again, expected, scored)
    floor = FLOORS["half" if half else "full"]
    return [Verdict(name, _distance(logps, expected, scored), spread, floor) for name, logps in found.items()]


def _distance(logps: torch.Tensor, expected: torch.Tensor, scored: torch.Tensor) -> tuple[float, float]:
    distance = (logps - expected).abs()[scored]
    return distance.mean().item(), distance.max().item()


@contextmanager
def _eval(model: torch.nn.Module) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    for module, _ in training:
        module.training = False
    try:
        yield
    finally:
        for module, was in training:
            module.training = was
