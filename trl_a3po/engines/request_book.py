"""The requests and scores that a worker is asked for, and what has become of each of them.

Guarantees: every request ends in one event, or is cancelled and has no event; requests that no worker has been sent
yet, and scores that no worker has answered, are sent to the next worker.
"""

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from trl_a3po.protocol.engine import EngineEvent, GroupFailed, GroupRequest
from trl_a3po.workers.channel import Channel

Answer = tuple[list[float] | str, int]
"""The log-probs, or why the tokens cannot be scored; and the version of the weights."""


class RequestBook:
    """Used by one thread at a time. Where a method takes a `channel`, it belongs to a worker that accepts requests;
    `None` means that there is no such worker."""

    def __init__(self) -> None:
        self._outstanding: set[int] = set()
        self._unsent: list[GroupRequest] = []
        self._events: deque[EngineEvent] = deque()
        self._scores: dict[int, tuple[Any, ...]] = {}  # messages that ask for a score, until `forget`
        self._answers: dict[int, Answer] = {}
        self._score_keys = itertools.count()

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    @property
    def sent(self) -> set[int]:
        """Ids of the requests that a worker has been sent and that have not ended."""
        return self._outstanding - {request.request_id for request in self._unsent}

    def submit(self, requests: Sequence[GroupRequest], channel: Channel | None) -> None:
        self._outstanding.update(request.request_id for request in requests)
        if channel is None:
            self._unsent.extend(requests)
        else:
            channel.send(("submit", list(requests)))

    def cancel(self, request_ids: Collection[int], channel: Channel | None) -> None:
        cancelled = set(request_ids)
        self._outstanding -= cancelled
        self._unsent = [request for request in self._unsent if request.request_id not in cancelled]
        self._events = deque(event for event in self._events if event.request_id not in cancelled)
        if channel is not None:
            channel.send(("cancel", list(cancelled)))

    def ended(self, events: Sequence[EngineEvent]) -> None:
        """Note how requests ended. Requests that were cancelled meanwhile are ignored."""
        for event in events:
            if event.request_id in self._outstanding:
                self._outstanding.remove(event.request_id)
                self._events.append(event)

    def fail(self, request_ids: Collection[int], reason: str) -> None:
        """Have these requests fail, unless they have ended already."""
        self.ended([GroupFailed(request_id, reason) for request_id in sorted(request_ids)])

    def fail_all(self, reason: str) -> None:
        self.fail(self._outstanding.copy(), reason)
        self._unsent = []

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[EngineEvent]:
        """The events since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    # --- scores -------------------------------------------------------------------------------------------------

    def request_score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], channel: Channel | None) -> int:
        """Ask for a score. Returns the key of the answer, which must be passed to `forget` in the end."""
        key = next(self._score_keys)
        self._scores[key] = ("score", key, tuple(prompt_ids), tuple(completion_ids))
        if channel is not None:
            channel.send(self._scores[key])
        return key

    def answer(self, key: int, answer: Answer) -> None:
        """Note a worker's answer. An answer that nobody waits for any more is ignored."""
        if key in self._scores:
            self._answers[key] = answer

    def is_answered(self, key: int) -> bool:
        return key in self._answers

    def forget(self, key: int) -> Answer | None:
        """The answer, if there is one. No worker will be asked for it any more."""
        del self._scores[key]
        return self._answers.pop(key, None)

    # --- the next worker ----------------------------------------------------------------------------------------

    def send_rest(self, channel: Channel) -> None:
        """Send a new worker the requests that have not been sent and the scores that have not been answered."""
        if self._unsent:
            channel.send(("submit", self._unsent))
            self._unsent = []
        for message in self._scores.values():
            channel.send(message)
