"""What the delivery check decides from log-probs of the trainer and the engine: pure functions.

Why movements are compared: the gap between engine and trainer depends on dtypes and kernels (1e-5 with fp32 on both
sides, up to a tenth with bf16), so no fixed number separates a good gap from a bad one. But the perturbation moves
log-probs by 1 to 3, far more than any such gap. The movement of an engine that follows is wrong by about its own gap,
a small part of that; an engine that leaves out a part of the weights, or divides by another temperature, is wrong by
much more. So the movement may be wrong by five gaps, counted as at least 5% and at most 20% of the movement, and the
gap may itself be 20% of it. With fp32 on both sides that detects one missing layer in 30, with bf16 a missing output
layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

SMALL_ERROR, LARGE_ERROR = 0.05, 0.2  # as parts of the trainer's movement
ERROR_PER_GAP = 5
DISTINCT_PER_GAP = 3  # versions whose log-probs differ by this many gaps of the start can be distinguished
MIN_GAP = 1e-4  # what rounding alone may cause

CAUSES = (
    "Likely causes: the adapter is not loaded, or only the weights beside it are; the publish was skipped or went to "
    "another engine; an untied copy of lm_head keeps old weights; a cache outlived the publish; a server was started "
    "with another base model; the engine divides by another temperature, filters before it takes log-probs, or "
    "computes in a dtype too coarse for this model. delivery_check_steps=0 switches this check off."
)


@dataclass(frozen=True)
class StartMeasurements:
    """What the check at start measured; each number is a mean over the probe tokens of |Δ log-prob|.

    Args:
        trainer_movement: the trainer's log-probs under the perturbed weights against those under the true ones.
        engine_movement: the same for the engine.
        movement_error: the engine's movement against the trainer's, token by token.
        restore_error: the engine's log-probs after the true weights were published again against those before.
        gap: engine against trainer under the true weights, at the end.
    """

    trainer_movement: float
    engine_movement: float
    movement_error: float
    restore_error: float
    gap: float

    @classmethod
    def of(cls, trainer: Sequence[torch.Tensor], engine: Sequence[torch.Tensor]) -> "StartMeasurements":
        """From log-probs `(N, T)`: `trainer` true and perturbed; `engine` true, perturbed, and true again."""
        (true, perturbed), (before, during, after) = trainer, engine
        return cls(
            trainer_movement=distance(perturbed, true),
            engine_movement=distance(during, before),
            movement_error=distance(during - before, perturbed - true),
            restore_error=distance(after, before),
            gap=distance(after, true),
        )

    def fault(self) -> str | None:
        """What is wrong, as a sentence with its numbers; `None` if the engine follows. NaN is a fault."""
        large = LARGE_ERROR * self.trainer_movement
        allowed = min(large, max(SMALL_ERROR * self.trainer_movement, ERROR_PER_GAP * self.gap))
        moved = f"moved the trainer's log-probs of the probe tokens by {self.trainer_movement:.3g} on average"
        if not self.engine_movement >= large:
            return f"A perturbed copy of the weights {moved}, but the engine's by {self.engine_movement:.3g}."
        if not self.movement_error <= allowed:
            return (
                f"A perturbed copy of the weights {moved} and the engine's by {self.engine_movement:.3g}, but not "
                f"alike: token by token they differ by {self.movement_error:.3g}, more than {allowed:.3g}."
            )
        if not self.restore_error <= allowed:
            return (
                f"A perturbed copy of the weights {moved}; after the true weights were published again, the engine's "
                f"log-probs are still {self.restore_error:.3g} from where they were, more than {allowed:.3g}."
            )
        if not self.gap <= large:
            return (
                f"For the same weights the engine's log-probs of the probe tokens are {self.gap:.3g} from the "
                f"trainer's on average, more than {large:.3g}, though both move alike."
            )
        return None


def fault_after_publish(
    engine: torch.Tensor, current: torch.Tensor, older: Mapping[int, torch.Tensor], version: int, start_gap: float
) -> str | None:
    """What is wrong with the engine's log-probs of the probe tokens, `(N, T)`, under `version`; `None` if the engine
    follows.

    Args:
        current: the trainer's log-probs under `version`.
        older: the trainer's log-probs under earlier versions.
        start_gap: the gap between engine and trainer at start.
    """
    gap = distance(engine, current)
    if not gap < torch.inf:
        return f"The engine's log-probs of the probe tokens under version {version} are not finite."
    changes = {old: distance(current, logps) for old, logps in older.items()}
    distances = {
        old: distance(engine, logps)
        for old, logps in older.items()
        if changes[old] > DISTINCT_PER_GAP * max(start_gap, MIN_GAP)
    }
    if not distances:
        return None
    closest = min(distances, key=distances.__getitem__)
    if gap < distances[closest]:
        return None
    return (
        f"Version {version} was published, but the engine's log-probs of the probe tokens are closer to version "
        f"{closest}: on average they are {distances[closest]:.3g} from version {closest} and {gap:.3g} from version "
        f"{version}; the two versions are {changes[closest]:.3g} apart, and the gap at start was {start_gap:.3g}."
    )


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean |Δ log-prob|."""
    return (one - other).abs().mean().item()
