"""The one loop that reads a worker process: what it sends, what it prints, and how it ends.

Guarantees: every whole message of the worker is yielded once and in order; what the worker prints is read meanwhile,
so the worker never blocks on its own output; what the socket did not take when it was sent is sent as soon as there is
room. The loop notices within `TICK` seconds that the worker has ended, also when a child of the worker keeps the
socket open.
"""

import math
import selectors
from collections.abc import Callable, Iterator
from typing import Any

from trl_a3po.workers.channel import UnreadableMessage
from trl_a3po.workers.process import WorkerProcess
from trl_a3po.workers.running_clock import RunningClock

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

    Time counts only while this process is not stopped.

    Args:
        timeout: seconds that reading may take in all.
        silence_timeout: seconds that may pass without a message.
        until: called at least every `TICK` seconds; once it returns `True`, the iteration stops.

    Raises:
        WorkerEnded: the worker's process has ended.
        WorkerUnusable: the worker was silent for too long, or sent bytes that are not a message.
        TimeoutError: `timeout` seconds have passed.
    """
    passed = _PassedTime(timeout, silence_timeout)
    with selectors.DefaultSelector() as selector:
        selector.register(worker.channel, selectors.EVENT_READ)
        selector.register(worker.output_fd, selectors.EVENT_READ)
        while not until():
            # Looked up before receiving: whatever an ended process has sent is then in the socket.
            ended = worker.ended
            _wait(selector, worker, 0.0 if ended else min(TICK, passed.remaining))
            messages = _received(worker)
            overdue = passed.note(heard=bool(messages))
            yield from messages
            if ended and not messages:
                raise WorkerEnded
            if overdue:
                raise TimeoutError


class _PassedTime:
    """How long a worker has been waited for, and how long it has said nothing."""

    def __init__(self, timeout: float | None, silence_timeout: float | None) -> None:
        self.remaining = math.inf if timeout is None else timeout
        self._silence_timeout = math.inf if silence_timeout is None else silence_timeout
        self._silence = 0.0
        self._clock = RunningClock(longest=2 * TICK)
        self._noted = self._clock()

    def note(self, *, heard: bool) -> bool:
        """Whether no time remains. Raises `WorkerUnusable` when the silence has lasted too long."""
        overdue = self.remaining <= 0
        now = self._clock()
        self.remaining = max(0.0, self.remaining - (now - self._noted))
        self._silence = 0.0 if heard else self._silence + now - self._noted
        self._noted = now
        if self._silence > self._silence_timeout:
            raise WorkerUnusable(f"sent nothing for {self._silence_timeout:g} seconds")
        return overdue


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
