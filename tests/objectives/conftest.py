"""Random batches, and the clipped PPO loss that a trainer computes, for the tests of the objectives."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch


@dataclass(frozen=True)
class Batch:
    policy_logps: torch.Tensor
    behavior_logps: torch.Tensor
    staleness: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    def fresh_policy(self) -> torch.Tensor:
        """The current log-probs as a new leaf that collects a gradient."""
        return self.policy_logps.detach().clone().requires_grad_()

    def rows(self, rows: slice) -> "Batch":
        return Batch(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def args(self) -> tuple[torch.Tensor, ...]:
        """In the order every anchor function takes them."""
        return self.policy_logps, self.behavior_logps, self.staleness, self.advantages, self.mask

    def but(self, **changes: torch.Tensor) -> "Batch":
        return replace(self, **changes)


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """`make_batch(seed)`: float64, staleness 0 to 8, both signs, log-ratios wide enough to clip at every staleness."""

    def make(seed: int = 0, rows: int = 12, tokens: int = 9, spread: float = 0.5, max_staleness: int = 8) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        normal = {"generator": generator, "dtype": torch.float64}
        staleness = torch.randint(0, max_staleness + 1, (rows, tokens), generator=generator)
        behavior_logps = -3 * torch.rand(rows, tokens, **normal)
        log_ratio = spread * torch.randn(rows, tokens, **normal) * staleness.clamp(min=1)
        lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
        return Batch(
            policy_logps=behavior_logps + log_ratio,
            behavior_logps=behavior_logps,
            staleness=staleness,
            advantages=torch.randn(rows, **normal),
            mask=torch.arange(tokens) < lengths.unsqueeze(1),
        )

    return make


def mean_of_row_means(per_token_loss: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def clipped_ppo(
    policy_logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    low: torch.Tensor | float = 0.8,
    high: torch.Tensor | float = 1.2,
    level: str = "token",
) -> torch.Tensor:
    """What a trainer makes of an anchor: `advantages` is `(B, T)`, `low` and `high` bound the ratio."""
    log_ratio = policy_logps - old_logps
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1)
    ratio = log_ratio.exp()
    return mean_of_row_means(-torch.min(ratio * advantages, ratio.clamp(low, high) * advantages), mask)


@pytest.fixture(scope="session")
def row_means() -> Callable[..., torch.Tensor]:
    return mean_of_row_means


@pytest.fixture(scope="session")
def ppo() -> Callable[..., torch.Tensor]:
    return clipped_ppo
