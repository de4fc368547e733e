"""The range of a number that is a setting, for its annotation: `cap: Annotated[float, Range(above=1)] = 4.0`."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The finite numbers within the bounds that are given.

    Args:
        least, most: bounds that belong to the range.
        above, below: bounds that do not.
    """

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, number: float) -> bool:
        within = self.least <= number <= self.most and self.above < number < self.below
        return within and math.isfinite(number)

    def __str__(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"from {self.least:g} to {self.most:g}"
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound))
