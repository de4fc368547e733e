"""What the worker process of an engine does: it handles messages and decodes, in turn.

Guarantees: messages are handled in order, between decode steps, so a request behind a `load` is sampled from those
weights or newer ones; a request that cannot be served fails alone; the process ends when its parent does; an error
that ends the process is the last thing it prints, and the last message that it sends.

Messages in: `setup`, `load`, `submit`, `cancel`, `end_episodes`, `score`. Messages out: `built`, `loaded`, `events`,
`progress`, `scored`, `unusable` of a worker that no other one could replace, `raised`, and `warning`, one for each
warning of the library.
"""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from trl_a3po.workers.channel import Channel
from trl_a3po.workers.process import parents_channel

if TYPE_CHECKING:  # importing torch takes seconds, and `parents_channel` comes first
    from trl_a3po.protocol.engine import EngineEvent, GroupRequest

ERROR_CHARACTERS = 2000  # of an error that is sent
HEARTBEAT = 0.5
"""Seconds between two `progress` messages; a decode step may delay the next one."""

Load = Callable[[int, tuple[str, ...] | None], None]
"""Loads the weights of a version from the staging memory: those of the given names, or all of them."""


class Decoder(Protocol):
    """What decodes, between two messages."""

    @property
    def tokens(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def idle(self) -> bool: ...

    @property
    def active_rollouts(self) -> int: ...

    @property
    def waiting_requests(self) -> int: ...

    @property
    def turns_prefilled_again(self) -> int: ...

    def submit(self, request: "GroupRequest") -> None:
        """Raises `ValueError` for a request that cannot be served."""

    def cancel(self, request_ids: Sequence[int]) -> None: ...

    def end_episodes(self, episodes: Sequence[int]) -> None: ...

    def step(self) -> "Sequence[EngineEvent]":
        """Decode once, and return the requests that ended."""

    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """Raises `ValueError` for tokens that cannot be scored."""

    def set_version(self, version: int) -> None:
        """The weights have been loaded that are this version."""


def run_worker(set_up: Callable[[Channel], tuple[Load, Decoder]]) -> None:
    """Set up and serve until the engine has closed its side; does not return."""
    channel, code = parents_channel(), 1
    logging.getLogger("trl_a3po").addHandler(_Warnings(channel))
    try:
        load, decoder = set_up(channel)
        _Server(channel, load, decoder).serve()
    except EOFError:
        code = 0  # the engine closed its side
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, Exception):  # not a signal
            channel.send(("raised", " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARACTERS]))
            channel.drain()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing to tidy up, and the teardown of a CUDA context takes seconds


class _Warnings(logging.Handler):
    """Sends warnings to the engine, which logs them where the user sees them."""

    def __init__(self, channel: Channel):
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send(("warning", record.getMessage()))


class _Server:
    """Handles messages and decodes, in turn."""

    def __init__(self, channel: Channel, load: Load, decoder: Decoder) -> None:
        self._channel = channel
        self._load = load
        self._decoder = decoder
        self._events: list[EngineEvent] = []
        self._busy_seconds = 0.0
        self._reported = time.monotonic()

    def serve(self) -> None:
        """Never returns. Raises `EOFError` when the engine has closed its side."""
        while True:
            if self._channel.poll(HEARTBEAT if self._decoder.idle else 0.0):
                for message in self._channel.receive():
                    self._handle(message)
            if not self._decoder.idle:
                began = time.monotonic()
                self._events += self._decoder.step()
                self._busy_seconds += time.monotonic() - began
            self._report()

    def _handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("submit", requests):
                for request in requests:
                    self._submit(request)
            case ("cancel", request_ids):
                self._decoder.cancel(request_ids)
            case ("end_episodes", episodes):
                self._decoder.end_episodes(episodes)
            case ("score", key, prompt_ids, completion_ids):
                answer: list[float] | str
                try:
                    answer = self._decoder.score(prompt_ids, completion_ids)
                except ValueError as error:
                    answer = str(error)
                self._channel.send(("scored", key, answer, self._decoder.version))
            case ("load", version, names):
                self._load(version, names)
                self._decoder.set_version(version)
                self._channel.send(("loaded", version))

    def _submit(self, request: "GroupRequest") -> None:
        from trl_a3po.protocol.engine import GroupFailed

        try:
            self._decoder.submit(request)
        except ValueError as error:
            self._events.append(GroupFailed(request.request_id, str(error)))

    def _report(self) -> None:
        decoder = self._decoder
        beat = time.monotonic() - self._reported >= HEARTBEAT
        if self._events or beat:
            # Events do not put the next beat off: right after them the slots may happen to be empty every time.
            self._reported = time.monotonic() if beat else self._reported
            counts = decoder.tokens, decoder.turns_prefilled_again
            now = decoder.active_rollouts, decoder.waiting_requests
            self._channel.send(("progress", *counts, self._busy_seconds, *now))
        if self._events:
            self._channel.send(("events", self._events))
            self._events = []
        self._channel.drain()
