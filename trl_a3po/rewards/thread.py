"""Where reward functions are called: one thread with one event loop.

Guarantees: everything that is submitted to a `RewardThread` runs in the same thread, one piece of work at a time, and
with the same current event loop; the thread ends when its `RewardThread` is no longer used, and never keeps the
process from ending.
"""

import asyncio
import contextlib
import os
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

NAME = "a3po rewards"

Result = TypeVar("Result")


class EventLoop:
    """The event loop of one thread, which alone uses this object."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def make_current(self) -> None:
        """Make it the thread's current event loop. A function may have closed it or set another one."""
        if self._runner.get_loop().is_closed():
            self._runner = asyncio.Runner()
        asyncio.set_event_loop(self._runner.get_loop())

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """What the coroutine returns."""
        return self._runner.run(coroutine)

    def close(self) -> None:
        """Cancel what is still awaited, and close the event loop."""
        self._runner.close()


class RewardThread:
    """A daemon thread, since a function that hangs must not keep the process from ending.

    `in_processes` lists the functions that were found to need a process of their own.
    """

    def __init__(self) -> None:
        self.in_processes: list[Callable[..., Any]] = []
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Any] | None = None

    def is_moved(self, func: Callable[..., Any]) -> bool:
        """Whether `func` needs a process of its own."""
        return any(func is moved for moved in self.in_processes)

    def submit(self, work: Callable[[EventLoop], Result]) -> "Future[Result]":
        """Have the thread call `work` with its event loop, after what was submitted before. From any thread."""
        future: Future[Result] = Future()
        with self._lock:
            if self._work is None:
                self._work = self._started()
            self._work.put((future, work))
        return future

    def abandon_if_busy(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the work under way. A thread that hangs is left alone, and a new one takes
        its place."""
        if self._work is None:
            return
        try:
            self.submit(lambda loop: None).result(timeout)
        except TimeoutError:
            with self._lock:
                self._work.put(None)
                self._work = None

    def _started(self) -> "queue.SimpleQueue[Any]":
        work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        weakref.finalize(self, work.put, None).atexit = False
        threading.Thread(target=_serve, args=(work,), name=NAME, daemon=True).start()
        return work


class CallingThread:
    """As a `RewardThread`, in the thread that submits: for a process that has nothing else to do."""

    def __init__(self) -> None:
        self.in_processes: list[Callable[..., Any]] = []
        self._loop = EventLoop()

    def is_moved(self, func: Callable[..., Any]) -> bool:
        return False

    def submit(self, work: Callable[[EventLoop], Result]) -> "Future[Result]":
        future: Future[Result] = Future()
        _set_result(future, work, self._loop)
        return future

    def abandon_if_busy(self, timeout: float) -> None:
        """Nothing is under way when the thread gets here."""


def _serve(work: "queue.SimpleQueue[Any]") -> None:
    loop = EventLoop()
    while (submitted := work.get()) is not None:
        future, function = submitted
        _set_result(future, function, loop)
        del submitted, future, function  # while the thread waits, it keeps nobody's trainer alive
    with contextlib.suppress(RuntimeError):  # a function has left its own loop running
        loop.close()


def end_forked_child(process: int, error: BaseException | None) -> None:
    """End the process unless it is `process`. A child that a function has forked, and that leaves the function, must
    not go on as if it were its parent.

    Args:
        process: id of the process that called the function.
        error: what the function raised; the exit code of the child is that of a script that raises it.
    """
    if os.getpid() == process:
        return
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _set_result(future: "Future[Result]", work: Callable[[EventLoop], Result], loop: EventLoop) -> None:
    process = os.getpid()
    try:
        result = work(loop)
    except BaseException as error:  # otherwise a function's SystemExit would end the thread silently
        end_forked_child(process, error)
        future.set_exception(error)
    else:
        end_forked_child(process, None)
        future.set_result(result)
