"""Rows of the tables that say, for every method and every setting of TRL and transformers, what becomes of it.

Guarantees: a row is followed, refused with what to do instead, or of no effect on what is sampled and trained; a test
fails when a library adds a name that has no row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["followed", "refused", "no effect"]


@dataclass(frozen=True, slots=True)
class BorderRow:
    """Names with the same outcome.

    Args:
        outcome: "followed": what GRPOTrainer does with it happens here too; "refused": an error says what to do
            instead; "no effect": it decides nothing about what is sampled and trained, here or in GRPOTrainer.
        what: where it is followed, what the error says, or why it has no effect.
        names: methods or settings.
    """

    outcome: Outcome
    what: str
    names: tuple[str, ...]


def named(rows: Iterable[BorderRow], outcome: Outcome | None = None) -> Iterator[tuple[str, str]]:
    """Every name of the rows with this outcome, and what becomes of it."""
    for row in rows:
        if outcome in (None, row.outcome):
            yield from ((name, row.what) for name in row.names)


def border_table(rows: Iterable[BorderRow], heading: str) -> list[list[str]]:
    """The rows as a table, its header first."""
    listed = [[", ".join(f"`{name}`" for name in row.names), row.outcome, row.what] for row in rows]
    return [[heading, "outcome", "what happens"], *listed]
