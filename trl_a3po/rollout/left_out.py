"""Rows of the data that are left out of a run, because no prompt can be made of them."""

from collections.abc import Mapping
from typing import NamedTuple


class LeftOut(NamedTuple):
    """What is made of a row that is left out.

    Args:
        reason: in words that follow "rows", the same for rows with the same fault.
        text: what is wrong with this row, and what to do about it.
    """

    reason: str
    text: str


def row_in_words(place: int, number: int | None) -> str:
    """A row by its `number` in the dataset, or by its place in the prompt stream where a dataset has no numbers."""
    return f"row {place} that was read from the stream" if number is None else f"row {number} of train_dataset"


def reasons_in_words(counts: Mapping[str, int]) -> str:
    """How many rows were left out for each reason, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {reason}" for reason, count in ordered)
