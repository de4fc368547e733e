"""Calls of other people's functions that may take long or hang: each in a daemon thread, a bounded number at a time.

Guarantees: a call that hangs blocks neither the event loop nor, once nobody waits for it any more, another call; it
never keeps the process from ending; calls that are made in one `CallThread` run in the same thread, one after another.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class CallThread:
    """A daemon thread that makes the calls given to it, in order."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self.busy = False
        threading.Thread(target=self._serve, name="a3po tool", daemon=True).start()

    def submit(self, function: Callable[[], Result]) -> "Future[tuple[Result | None, BaseException | None]]":
        """Call `function` in the thread. The future has what it returned, and what it raised: an exception of its own
        would be lost for those, such as `StopIteration`, that a future cannot hold."""
        future: Future[tuple[Result | None, BaseException | None]] = Future()
        self._work.put((future, function))
        return future

    def end(self) -> None:
        """Let the thread end after the calls given to it so far."""
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            future, function = work
            if future.set_running_or_notify_cancel():
                self.busy = True
                outcome = _outcome(function)
                self.busy = False
                future.set_result(outcome)
            del work, future, function  # while the thread waits, it keeps nothing alive


class Calls:
    """Calls in threads, at most `limit` of them at a time. It belongs to one event loop."""

    def __init__(self, limit: int):
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[CallThread] = []

    async def call(self, function: Callable[[], Result], thread: CallThread | None = None) -> Result:
        """What `function` returns, called in `thread`, or in any thread if it is `None`.

        If the caller stops waiting, the call goes on unnoticed, and does not count any more.
        """
        async with self._slots:
            own = thread or (self._idle.pop() if self._idle else CallThread())
            future = asyncio.wrap_future(own.submit(function))
            try:
                value, error = await future
            finally:
                if thread is None and future.done() and not future.cancelled():
                    self._idle.append(own)
                elif thread is None:
                    own.end()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # there was no error, so it is a Result

    def close(self) -> None:
        """End the threads that wait for work."""
        while self._idle:
            self._idle.pop().end()


def _outcome(function: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # also an exit: it ends the call, not the thread
        return None, error
