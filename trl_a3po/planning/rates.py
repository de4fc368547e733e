"""How fast the parts of a run are: an engine, the trainer, a publish.

Guarantees: pure; between measured points the time of a decode step is interpolated, and beyond them nothing gets
faster than what was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Tokens per second of one engine, by the number of sequences that it decodes at the same time.

    The time of a decode step, n / tokens per second, is interpolated between two points. Below the first point a step
    takes as long as there: a small batch waits for the weights to be read, whatever its size. Above the last point the
    tokens per second stay what they are there.

    Args:
        points: (sequences, tokens per second), in any order, at least one.

    Raises:
        ValueError: there is no point, a number is not positive, or two points have the same number of sequences.
    """

    points: Sequence[tuple[float, float]]
    _sequences: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _seconds: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        points = sorted(self.points)
        if not points:
            raise ValueError("The engine has no measured speed: give at least one point, SEQUENCES:TOKENS_PER_SECOND.")
        for sequences, rate in points:
            if not (0 < sequences < float("inf") and 0 < rate < float("inf")):
                raise ValueError(
                    f"The engine's speed has the point {sequences:g}:{rate:g}, but both numbers must be positive and "
                    "finite."
                )
        numbers = tuple(sequences for sequences, _ in points)
        if len(set(numbers)) < len(numbers):
            raise ValueError(
                f"The engine's speed has two points for the same number of sequences ({numbers}): leave one out."
            )
        object.__setattr__(self, "_sequences", numbers)
        object.__setattr__(self, "_seconds", tuple(sequences / rate for sequences, rate in points))

    def step_seconds(self, sequences: float) -> float:
        """Time in which each of `sequences` sequences gets one more token."""
        if sequences > self._sequences[-1]:
            return self._seconds[-1] * sequences / self._sequences[-1]
        return float(np.interp(sequences, self._sequences, self._seconds))

    def tokens_per_second(self, sequences: float) -> float:
        return sequences / self.step_seconds(sequences)

    def fastest(self, most: float) -> float:
        """Most tokens per second with at most `most` sequences."""
        inside = [sequences for sequences in self._sequences if sequences < most]
        return max(self.tokens_per_second(sequences) for sequences in (*inside, most))


@dataclass(frozen=True, slots=True)
class Rates:
    """
    Args:
        engine: of one engine.
        training_tokens_per_second: completion tokens that one training process trains on in a second, forward and
            backward pass together.
        micro_step_seconds: what a micro-step takes besides, whatever the number of its tokens.
        publish_seconds: time that training waits for a publish.
        optimizer_step_seconds: what an optimizer step takes besides, whatever the number of its micro-steps.
    """

    engine: EngineSpeed
    training_tokens_per_second: float
    micro_step_seconds: float = 0.0
    publish_seconds: float = 0.0
    optimizer_step_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.training_tokens_per_second < float("inf"):
            raise ValueError(
                f"training_tokens_per_second is {self.training_tokens_per_second:g}, but it must be positive and "
                "finite."
            )
        for name in ("micro_step_seconds", "publish_seconds", "optimizer_step_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name):g}, but it must be 0 or more, and finite.")
