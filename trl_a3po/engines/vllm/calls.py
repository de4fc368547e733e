"""Completion calls, which a process of their own (`reader.py`) makes and reads, as the pool sees them.

Guarantees: the tokens of a call are passed on in the order in which they came, then its end, once; a reader process
that dies, or is killed after a silence of `SILENCE_TIMEOUT` seconds, fails the calls that it was making and nothing
else, and the next call starts another reader; the reader outlives neither `close` nor this process.
"""

import itertools
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trl_a3po.engines.vllm.http import HttpFault, TimeoutFault
from trl_a3po.workers.process import WorkerProcess
from trl_a3po.workers.reading import WorkerEnded, WorkerUnusable, read_messages

READER = "trl_a3po.engines.vllm.reader"
SILENCE_TIMEOUT = 30.0  # seconds; a running reader sends something every second
_END_TIMEOUT = 2.0  # seconds for a reader to end


class CallRequest(NamedTuple):
    """A call to make to the server at `url`, with a limit of `timeout` seconds for all of it."""

    number: int
    url: str
    body: dict[str, Any]
    timeout: float


class Barrier(NamedTuple):
    """Asks the reader to report this barrier once it has passed on everything that servers have sent for `calls`."""

    number: int
    calls: list[int]


class Ended(NamedTuple):
    """The end of a call, or of all calls (-1): the server's fault, or the traceback of an error in this library, or
    neither."""

    number: int
    fault: HttpFault | None
    error: str | None = None


class ReaderUpdate(NamedTuple):
    """What has happened since the last update: chunks by call, as the tuples that `TokenChunk` is made of, calls that
    ended, and barriers that were reached."""

    chunks: dict[int, list[tuple[Any, ...]]]
    ended: list[Ended]
    barriers: Sequence[int] = ()


class Calls:
    """
    Args:
        on_update: called with each update of the reader, by the one thread of this object.
    """

    def __init__(self, on_update: Callable[[ReaderUpdate], None]) -> None:
        self._on_update = on_update
        self._changed = threading.Condition()  # guards all that follows
        self._worker: WorkerProcess | None = None
        self._waiting: list[CallRequest | int] = []  # messages for a reader that is to be started
        self._barriers = itertools.count()
        self._reached: set[int] = set()  # barriers that the reader has reported
        self._open: set[int] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="a3po-vllm-calls", daemon=True)
        self._thread.start()

    def make(self, request: CallRequest) -> None:
        with self._changed:
            self._open.add(request.number)
            self._send(request)

    def end(self, number: int) -> None:
        """Have a call end at once, as if its connection had broken."""
        with self._changed:
            if number in self._open:
                self._send(number)

    def catch_up(self, numbers: Sequence[int], timeout: float) -> None:
        """Wait until everything that servers have sent for these calls has been passed on. A reader that has not done
        so after `timeout` seconds is killed, and its calls fail without the rest.

        Raises:
            TimeoutFault: the reader was killed and has not ended.
        """
        with self._changed:
            worker = self._worker
            if worker is None:
                return
            barrier = Barrier(next(self._barriers), list(numbers))
            worker.channel.send(barrier)
            if not self._changed.wait_for(
                lambda: barrier.number in self._reached or self._worker is not worker, timeout
            ):
                worker.kill()
                if not self._changed.wait_for(lambda: self._worker is not worker, _END_TIMEOUT):
                    raise TimeoutFault(
                        f"The process that reads vLLM's answers, {worker.pid}, was killed and did not end."
                    )
            self._reached.discard(barrier.number)

    def close(self) -> None:
        """End the reader. Nothing more of its calls is passed on."""
        with self._changed:
            self._closed = True
            if self._worker is not None:
                self._worker.channel.shutdown()  # which wakes the thread that reads it
            self._changed.notify_all()
        self._thread.join()

    def _send(self, message: CallRequest | int) -> None:
        if self._worker is None:
            self._waiting.append(message)
            self._changed.notify_all()
        else:
            self._worker.channel.send(message)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closed)
                    if self._closed:
                        return
                self._fail(self._work())
        except BaseException:
            if self._worker is not None:
                self._worker.kill()
                self._worker.reap(_END_TIMEOUT)
            self._on_update(ReaderUpdate({}, [Ended(-1, None, traceback.format_exc())]))

    def _work(self) -> str:
        """Have a reader process make calls until it ends. Returns how it ended, for a sentence about it."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
            try:
                worker = self._worker = WorkerProcess(READER)
            except OSError as error:
                return f"could not be started: {error}"
            for message in waiting:
                worker.channel.send(message)
        fault = self._read(worker)
        with self._changed:
            self._worker, closed = None, self._closed
            self._changed.notify_all()
        if closed:
            worker.kill()
        how = worker.reap(_END_TIMEOUT, fault=fault)
        return f"ended ({how})" + "".join(f": {line}" for line in worker.output_tail.splitlines()[-1:])

    def _fail(self, how: str) -> None:
        """The calls that the reader was making have failed with it; the servers have not."""
        with self._changed:
            if self._closed:
                return
            lost = self._open.difference(
                message.number for message in self._waiting if isinstance(message, CallRequest)
            )
            self._open -= lost
        fault = HttpFault(f"The process that reads vLLM's answers {how}.")
        self._on_update(ReaderUpdate({}, [Ended(number, fault) for number in sorted(lost)]))

    def _read(self, worker: WorkerProcess) -> str | None:
        """Pass on the process's messages until it ends or this object is closed. Returns what is wrong with a process
        that has to be killed."""
        try:
            for update in read_messages(worker, silence_timeout=SILENCE_TIMEOUT, until=lambda: self._closed):
                self._on_update(update)
                with self._changed:
                    self._open.difference_update(ended.number for ended in update.ended)
                    self._reached.update(update.barriers)
                    self._changed.notify_all()
        except WorkerEnded:
            return None
        except WorkerUnusable as fault:
            return str(fault)
        return None
