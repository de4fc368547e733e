"""Objects in processes of their own, with the methods they have there.

Guarantees: the process runs this package's module, never the user's script; calls that are made in one thread here are
made in one thread there, the first one's in the main thread of the process; a call of an object whose process has
ended raises `ProcessEnded`, which says how it ended; an exception of a method is raised here with its type's name, its
text and its traceback; `close` calls the object's `close`, if it has one, and ends the process, whatever happens.
No process outlives `RemoteObjects.end`, or this process.
"""

import contextlib
import itertools
import logging
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from trl_a3po.workers.process import WorkerProcess
from trl_a3po.workers.reading import WorkerEnded, WorkerUnusable, read_messages

logger = logging.getLogger(__name__)

MODULE = "trl_a3po.workers.object_worker"
CLOSE_TIMEOUT = 3.0  # seconds for the object's `close`
END_TIMEOUT = 1.0  # seconds for the process to end by itself


class ProcessEnded(Exception):
    """The process of an object has ended."""


class RemoteError(Exception):
    """An exception of an object in another process. Its class has the name of the exception's."""


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text."""


class RemoteObjects:
    """Makes objects in processes, and ends those processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[ObjectProcess] = set()
        self._ended = False

    def make(self, factory: bytes) -> Any:
        """Start a process, and make an object in it.

        Args:
            factory: a function without arguments that returns the object, pickled by `cloudpickle`.

        Returns:
            An object whose class has the name of the object's class and its methods: its public functions. Its
            `close` ends the process.

        Raises:
            ProcessEnded: the process ended before it had made the object.
            RemoteError: the factory raised.
        """
        with self._lock:
            if self._ended:
                raise ProcessEnded("the run has ended")
            process = ObjectProcess(factory, self._discard)
            self._processes.add(process)
        try:
            name, methods = process.made.result()
        except BaseException:
            process.end()
            raise
        functions = {method: _calls(method) for method in methods if method != "close"}
        return type(name, (RemoteObject,), functions)(process, "close" in methods)

    def end(self) -> None:
        """End every process that is still running, such as one whose factory hangs. Takes bounded time."""
        with self._lock:
            self._ended, processes = True, list(self._processes)
        for process in processes:
            process.begin_end()
        for process in processes:
            process.end()

    def _discard(self, process: "ObjectProcess") -> None:
        with self._lock:
            self._processes.discard(process)


class RemoteObject:
    """What `RemoteObjects.make` returns."""

    def __init__(self, process: "ObjectProcess", closes: bool):
        self._process = process
        self._closes = closes

    def close(self) -> None:
        """Call the object's `close`, and end its process. Does nothing if the process has ended."""
        try:
            if self._closes and not self._process.ended:
                self._process.call("close", (), {}, CLOSE_TIMEOUT)
        except TimeoutError:
            logger.warning(
                "close() of a %s did not return within %s s, and its process was killed.",
                *(type(self).__name__, CLOSE_TIMEOUT),
            )
        except ProcessEnded:
            logger.debug("The process of a %s ended in close().", type(self).__name__)
        finally:
            self._process.end()


class ObjectProcess:
    """The process of an object.

    Args:
        factory: as for `RemoteObjects.make`.
        ended: called when the process has ended.
    """

    def __init__(self, factory: bytes, ended: Callable[["ObjectProcess"], None]):
        self._tell = ended
        self.made: Future[tuple[str, list[str]]] = Future()
        self.ended = False
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards `ended` and what follows
        self._calls: dict[int, Future[Any]] = {}
        self._channel: Any = None
        self._ending = threading.Event()
        # Linux ends a worker when the thread that started it ends, so this thread lives as long as the process.
        self._thread = threading.Thread(target=self._watch, args=(factory,), name="a3po environment", daemon=True)
        self._thread.start()

    def call(
        self, method: str, arguments: tuple[Any, ...], named: dict[str, Any], timeout: float | None = None
    ) -> Any:
        """What the method returns.

        Raises:
            ProcessEnded: the process has ended.
            TimeoutError: it took longer than `timeout` seconds, and goes on.
            RemoteError: the method raised.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self.ended:
                raise ProcessEnded("its process has ended")
            number = next(self._numbers)
            self._calls[number] = future
            self._channel.send(("call", number, threading.get_ident(), method, arguments, named))
        kind, *answer = future.result(timeout)
        if kind == "returned":
            return pickle.loads(answer[0])
        name, text, traceback = answer
        raise type(name, (RemoteError,), {})(text) from RemoteTraceback(traceback)

    def begin_end(self) -> None:
        """Have the process end soon."""
        self._ending.set()

    def end(self) -> None:
        """End the process. Takes bounded time."""
        self.begin_end()
        self._thread.join(END_TIMEOUT + 1)

    # --- the thread of the process -------------------------------------------------------------------------------

    def _watch(self, factory: bytes) -> None:
        try:
            process = WorkerProcess(MODULE, shows_output=True)
        except OSError as error:  # no more processes, memory or files
            self._end(f"its process could not be started: {error}")
            return
        self._channel = process.channel
        process.channel.send(factory)
        how = ""
        try:
            for message in read_messages(process, until=self._ending.is_set):
                self._receive(message)
            process.channel.shutdown()
        except WorkerEnded:
            pass
        except WorkerUnusable as fault:
            how = process.reap(0.0, fault=str(fault))
        how = how or process.reap(0.0 if self._ending.is_set() else END_TIMEOUT)
        printed = process.output_tail or "(nothing)"
        self._end("it was closed" if self._ending.is_set() else f"its process ended ({how}). It printed:\n{printed}")

    def _receive(self, message: Any) -> None:
        match message:
            case ("made", name, methods):
                self.made.set_result((name, methods))
            case ("failed", name, text, traceback):
                error = type(name, (RemoteError,), {})(text)
                error.__cause__ = RemoteTraceback(traceback)
                self.made.set_exception(error)
            case ("answer", number, *answer):
                with self._lock:
                    future = self._calls.pop(number)
                future.set_result(answer)

    def _end(self, why: str) -> None:
        with self._lock:
            self.ended = True
            calls, self._calls = list(self._calls.values()), {}
        for future in [self.made, *calls]:
            with contextlib.suppress(InvalidStateError):  # it has its result
                future.set_exception(ProcessEnded(why))
        self._tell(self)


def _calls(method: str) -> Callable[..., Any]:
    def call(self: RemoteObject, *arguments: Any, **named: Any) -> Any:
        return self._process.call(method, arguments, named)

    call.__name__ = call.__qualname__ = method
    return call
