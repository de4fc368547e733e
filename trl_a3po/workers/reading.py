"""The one loop that reads a worker process: what it sends, what it prints, and how it ends.

Guarantees: every whole message of the worker is yielded once and in order; what the worker prints is read meanwhile,
so the worker never blocks on its own output; what the socket did not take when it was sent is sent as soon as there is
room. The loop notices within `TICK` seconds that the worker has ended, also when a child of the worker keeps the
socket open.
"""

import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any

from trl_a3po.workers.channel import UnreadableMessage
from trl_a3po.workers.process import WorkerProcess

TICK = 0.2
"""Seconds after which the loop looks around, even when nothing has come from the worker."""


class WorkerEnded(Exception):
    """The worker's process has ended, and every message it sent has been read."""


class WorkerUnusable(Exception):
    """The worker's process is running but is of no use any more. The message completes a sentence that begins with
    "The worker"."""


def read_messages(
    worker: WorkerProcess,
    *,
    timeout: float | None = None,
    silence_timeout: float | None = None,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[Any]:
    """Yield the worker's messages as they come.

    Args:
        timeout: seconds that reading may take in all.
        silence_timeout: seconds that may pass without a message.
        until: called at least every `TICK` seconds; once it returns `True`, the iteration stops.

    Raises:
        WorkerEnded: the worker's process has ended.
        WorkerUnusable: the worker was silent for too long, or sent bytes that are not a message.
        TimeoutError: `timeout` seconds have passed.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    silence = _Silence(silence_timeout)
    with selectors.DefaultSelector() as selector:
        selector.register(worker.channel, selectors.EVENT_READ)
        selector.register(worker.output_fd, selectors.EVENT_READ)
        while not until():
            # Looked up before receiving: whatever an ended process has sent is then in the socket.
            ended = worker.ended
            remaining = TICK if deadline is None else deadline - time.monotonic()
            _wait(selector, worker, 0.0 if ended else max(0.0, min(TICK, remaining)))
            messages = _received(worker)
            silence.note(heard=bool(messages))
            yield from messages
            if ended and not messages:
                raise WorkerEnded
            if remaining <= 0:
                raise TimeoutError


class _Silence:
    """How long a worker has said nothing."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._seconds = 0.0
        self._noted = time.monotonic()

    def note(self, *, heard: bool) -> None:
        """Raises `WorkerUnusable` when the silence has lasted too long."""
        # A long interval is one during which this process, and maybe the worker too, was stopped.
        interval = min(time.monotonic() - self._noted, 2 * TICK)
        self._seconds = 0.0 if heard else self._seconds + interval
        self._noted = time.monotonic()
        if self._timeout is not None and self._seconds > self._timeout:
            raise WorkerUnusable(f"sent nothing for {self._timeout:g} seconds")


def _wait(selector: selectors.BaseSelector, worker: WorkerProcess, timeout: float) -> None:
    """Wait until there may be something to receive, or room for what is still to be sent."""
    writing = 0 if worker.channel.flush() else selectors.EVENT_WRITE
    selector.modify(worker.channel, selectors.EVENT_READ | writing)
    for key, _ in selector.select(timeout):
        if key.fileobj == worker.output_fd and not worker.read_output():
            selector.unregister(worker.output_fd)


def _received(worker: WorkerProcess) -> list[Any]:
    try:
        return worker.channel.receive()
    except EOFError:
        raise WorkerEnded from None
    except UnreadableMessage:
        raise WorkerUnusable("sent bytes that are not a message") from None
