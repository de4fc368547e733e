"""`LossInputs`: what a loss function receives, which notes what has been read.

Guarantees: a copy counts as a read of every value, so that what was read is never missing from the record; a value
that is not ready yet cannot be read.
"""

from collections.abc import Collection, Iterator
from typing import Any


class LossInputs(dict[str, Any]):
    """A micro-batch that knows which of its values have been read.

    Args:
        values: the micro-batch.
        not_ready: names of values that must not be read before `ready` is called.
    """

    def __init__(self, values: dict[str, Any], not_ready: Collection[str] = ()):
        super().__init__(values)
        self.read: set[str] = set()
        self._not_ready = frozenset(not_ready)

    def ready(self) -> None:
        """From now on, every value may be read."""
        self._not_ready = frozenset()

    def __getitem__(self, name: str) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._note(name)
        return super().pop(name, *default)

    def __iter__(self) -> Iterator[str]:  # with a method of its own, `dict(inputs)` and `{**inputs}` use `__getitem__`
        return super().__iter__()

    def items(self) -> Any:
        return dict(self).items()

    def values(self) -> Any:
        return dict(self).values()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def _note(self, name: str) -> None:
        if name in self._not_ready:
            raise RuntimeError(
                f"The loss read {name!r} before it asked for the log-probs of the policy, so that the objective would "
                'not be applied. GRPOTrainer._compute_loss is supported as TRL 1.16 has it: pip install "trl>=1.16,'
                '<1.17", and undo changes to it.'
            )
        self.read.add(name)
