"""Which of several scorers scores a text.

Guarantees: a text is always scored by the same scorer, as long as that scorer is available; as many different texts as
scorers are scored by all of them, so a scorer that missed a publish shows.
"""

from collections.abc import Hashable, Sequence
from typing import TypeVar

Scorer = TypeVar("Scorer", bound=Hashable)

Text = tuple[tuple[int, ...], tuple[int, ...]]
"""The token ids of a prompt and of its completion."""


class ScorerChoice:
    """Remembers which scorer, named by any hashable value, scores each text."""

    def __init__(self) -> None:
        self._chosen: dict[Text, Hashable] = {}

    def choose(self, text: Text, available: Sequence[Scorer]) -> Scorer:
        """The scorer of `text` among those that are `available`, which must not be empty."""
        chosen = next((scorer for scorer in available if scorer == self._chosen.get(text)), None)
        if chosen is None:
            used = list(self._chosen.values())
            chosen = min(available, key=used.count)
            self._chosen[text] = chosen
        return chosen
