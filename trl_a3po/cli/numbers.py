"""Options whose value is a number within limits.

Guarantees: what is no such number is a `SettingsError` that names the option as it was written, its value, and which
numbers it takes; nan and infinity are never taken.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from trl_a3po.cli.options import SettingsError


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that an option takes.

    Args:
        least, most: the smallest and the largest of them. What is far beyond any run would only overflow.
        of: what they count.
        whole: they have no fraction.
    """

    least: float
    most: float
    of: str = ""
    whole: bool = False

    def read(self, text: str) -> float | None:
        """The number that `text` is, `None` if it is none of these."""
        try:
            number = int(text) if self.whole else float(text)
        except ValueError:
            return None
        return number if self.least <= number <= self.most else None  # nan lies nowhere

    def __str__(self) -> str:
        return (
            f"a {'whole ' * self.whole}number{self.of and f' of {self.of}'} from {self.least:g} to {self.most:,.15g}"
        )


COUNT = Numbers(1, 100_000, whole=True)
SECONDS = Numbers(0, 1_000_000, "seconds")
SPEED = Numbers(0.001, 1e9, "tokens per second")
GIBIBYTES = Numbers(0.00001, 1_000_000, "GiB")
SEQUENCES = Numbers(1, 1_000_000, "sequences")
TOKENS = Numbers(1, 10_000_000, "tokens")


class NumberAction(argparse.Action):
    """Stores the number of an option: `add_argument("--gpus", action=NumberAction, numbers=COUNT)`."""

    def __init__(self, *args: Any, numbers: Numbers, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._numbers = numbers

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        number = self._numbers.read(values)
        if number is None:
            raise SettingsError(f"{option} is {values!r}, but it must be {self._numbers}.")
        setattr(namespace, self.dest, number)
