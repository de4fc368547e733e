"""The run's `log_history` on its way to the reward workers.

Guarantees: a worker has nothing of the log until a reward function reads it, and then the log as it was when the group
was sent. An entry travels to a worker once, and again only if it, or one before it, has changed.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Entry = dict[str, Any]


class SentLog:
    """The log that was sent last, to any worker. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[Entry] = []

    def addition(self, log: list[Entry], known: list[Entry]) -> tuple[int, list[Entry]]:
        """What a worker needs to have `log`: how many of its entries it keeps, and what comes after them.

        Args:
            log: the log of the run.
            known: what the worker has, empty at first. It is changed to what the worker will have.
        """
        with self._lock:
            same = _common(self._entries, log)
            self._entries[same:] = map(dict, log[same:])  # copies: a callback may change an entry later
            kept = _common(known, self._entries)
            known[kept:] = self._entries[kept:]
            return kept, known[kept:]


class ReceivedLog:
    """The log in a worker, as far as it was asked for."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, kept: int, entries: list[Entry]) -> list[Entry]:
        """The log after an `addition`, as a copy that a reward function may change."""
        self._entries[kept:] = entries
        return [dict(entry) for entry in self._entries]


class StateInWorker(SimpleNamespace):
    """The trainer's state as the reward functions of a worker receive it with a group. Its `log_history` is asked for
    when one of them first reads it. A copy of the state holds it.

    Args:
        read_log: asks for the log.
        facts: everything else of the state.
    """

    __slots__ = ("_read_log",)

    def __init__(self, read_log: Callable[[], list[Entry]], /, **facts: Any):
        super().__init__(**facts)
        self._read_log = read_log

    def __getattr__(self, name: str) -> Any:
        if name != "log_history":
            raise AttributeError(f"The trainer's state has no {name!r}.")
        self.log_history = self._read_log()
        return self.log_history

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), {**vars(self), "log_history": self.log_history}


def _common(first: list[Entry], second: list[Entry]) -> int:
    """How many entries at the beginning are equal."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(i for i in range(length) if first[i] is not second[i] and first[i] != second[i])
