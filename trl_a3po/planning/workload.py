"""What a run has to do: how long completions are, and how long rewards take.

Guarantees: pure; the same generator draws the same values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

Array = np.ndarray[tuple[int], np.dtype[np.float64]]


class Draw(Protocol):
    """A distribution."""

    @property
    def mean(self) -> float: ...

    @property
    def largest(self) -> float: ...

    def draw(self, generator: np.random.Generator, count: int) -> Array:
        """`(count,)` values, those of one group where groups differ."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always `value`."""

    value: float

    def __post_init__(self) -> None:
        _check("value", self.value, 0.0)

    @property
    def mean(self) -> float:
        return self.value

    @property
    def largest(self) -> float:
        return self.value

    def draw(self, generator: np.random.Generator, count: int) -> Array:
        return np.full(count, self.value)


@dataclass(frozen=True, slots=True)
class Geometric:
    """Lengths of completions that end at every token with the same chance, cut at `longest` tokens.

    Args:
        before_cut: mean length of completions that are not cut.
        longest: `max_completion_length`.
    """

    before_cut: float
    longest: int

    def __post_init__(self) -> None:
        _check("the mean of a geometric length", self.before_cut, 1.0)
        _check("the longest geometric length", self.longest, 1.0)

    @property
    def mean(self) -> float:
        return self.before_cut * (1 - (1 - 1 / self.before_cut) ** self.longest)

    @property
    def largest(self) -> float:
        return float(self.longest)

    def draw(self, generator: np.random.Generator, count: int) -> Array:
        return np.minimum(generator.geometric(1 / self.before_cut, count), self.longest).astype(float)


@dataclass(frozen=True, slots=True)
class Measured:
    """Values of a finished run. Those of a group are drawn from one group of that run, because completions of one
    prompt resemble each other.

    Args:
        groups: the values of each group, at least one group with at least one value.
    """

    groups: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise ValueError("No values were measured: give a run that has trained at least one group.")

    @property
    def mean(self) -> float:
        return sum(map(sum, self.groups)) / sum(map(len, self.groups))

    @property
    def largest(self) -> float:
        return float(max(map(max, self.groups)))

    def draw(self, generator: np.random.Generator, count: int) -> Array:
        group = self.groups[int(generator.integers(len(self.groups)))]
        return generator.choice(np.asarray(group, dtype=float), count, replace=count > len(group))


@dataclass(frozen=True, slots=True)
class Workload:
    """
    Args:
        lengths: tokens of a completion, at least 1.
        reward_seconds: time that the reward functions take for one group.
    """

    lengths: Draw
    reward_seconds: Draw = field(default_factory=lambda: Fixed(0.0))


def _check(name: str, value: float, least: float) -> None:
    if not least <= value < float("inf"):
        raise ValueError(f"{name} is {value:g}, but it must be at least {least:g} and finite.")
