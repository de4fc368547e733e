"""Calls of completions, made and read in a process of their own (`reader.py`), as the pool sees them.

Guarantees: of each call, its tokens are told in the order in which they came, then its end, once; a reading process
that dies, or is silent for `SILENCE` seconds and is ended, fails the calls that it was making and nothing else, and
the next call starts another one; it outlives neither `close` nor this process.
"""

import itertools
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trl_a3po.engines.vllm.http import HttpFault, LimitFault
from trl_a3po.workers.listener import Listener
from trl_a3po.workers.process import WorkerProcess

READER = "trl_a3po.engines.vllm.reader"
SILENCE = 30.0  # seconds; a process that is alive says something every second
_TICK = 0.2
_GRACE = 2.0


class Ask(NamedTuple):
    """A call to be made of the server at `url`; it may take `limit` seconds."""

    number: int
    url: str
    body: dict[str, Any]
    limit: float


class Mark(NamedTuple):
    """Asks to be told of once nothing more that was sent of `calls` is left to be told of."""

    number: int
    calls: list[int]


class Ended(NamedTuple):
    """The end of a call (-1: of all): what went wrong with the server, or a traceback of what did here, or neither."""

    number: int
    fault: HttpFault | None
    error: str | None = None


class Told(NamedTuple):
    """What has come since the last message: pieces by call, as the tuples that `Piece` is made of, ends, and marks."""

    pieces: dict[int, list[tuple]]
    ended: list[Ended]
    marks: Sequence[int] = ()


class Calls:
    """
    Args:
        tell: called with what has come, by the one thread of this object.
    """

    def __init__(self, tell: Callable[[Told], None]):
        self._tell = tell
        self._changed = threading.Condition()  # guards all that follows
        self._worker: WorkerProcess | None = None
        self._waiting: list[Ask | int] = []  # for a process that is to be started
        self._marks = itertools.count()
        self._marked: set[int] = set()  # marks that were told of
        self._open: set[int] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="a3po-vllm-calls", daemon=True)
        self._thread.start()

    def make(self, ask: Ask) -> None:
        with self._changed:
            self._open.add(ask.number)
            self._send(ask)

    def end(self, number: int) -> None:
        """Have a call end where it is, as one whose connection broke."""
        with self._changed:
            if number in self._open:
                self._send(number)

    def catch_up(self, numbers: Sequence[int], limit: float) -> None:
        """Wait until all that servers have sent of some calls has been told. A process that has not done so after
        `limit` seconds is ended, and its calls fail without the rest.

        Raises:
            LimitFault: it does not end.
        """
        with self._changed:
            worker = self._worker
            if worker is None:
                return
            mark = Mark(next(self._marks), list(numbers))
            worker.channel.send(mark)
            if not self._changed.wait_for(lambda: mark.number in self._marked or self._worker is not worker, limit):
                worker.kill()
                if not self._changed.wait_for(lambda: self._worker is not worker, _GRACE):
                    raise LimitFault(
                        f"The process that reads vLLM's answers, {worker.pid}, was killed and did not end."
                    )
            self._marked.discard(mark.number)

    def close(self) -> None:
        """End the process. What it was at is not told of any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _send(self, message: Ask | int) -> None:
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
            self._tell(Told({}, [Ended(-1, None, traceback.format_exc())]))

    def _work(self) -> str:
        """Have a process make calls until it ends, and say how it did."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
            try:
                worker = self._worker = WorkerProcess(READER)
            except OSError as error:
                return f"could not be started: {error}"
            for message in waiting:
                worker.channel.send(message)
        silent = self._listen(worker)
        with self._changed:
            self._worker, closed = None, self._closed
            self._changed.notify_all()
        if closed or silent:
            worker.kill()
        end = worker.bury(_GRACE)
        if silent:
            return f"said nothing for {SILENCE:g} s and was ended"
        return f"ended ({end})" + "".join(f": {line}" for line in worker.last_words.splitlines()[-1:])

    def _fail(self, how: str) -> None:
        """The calls that were being made have failed with the process; the servers have not."""
        with self._changed:
            if self._closed:
                return
            lost = self._open.difference(message.number for message in self._waiting if isinstance(message, Ask))
            self._open -= lost
        fault = HttpFault(f"The process that reads vLLM's answers {how}.")
        self._tell(Told({}, [Ended(number, fault) for number in sorted(lost)]))

    def _listen(self, worker: WorkerProcess) -> bool:
        """Tell what the process says until it ends, or this is closed; whether it was silent for too long."""
        silence, looked = 0.0, time.monotonic()
        with Listener(worker) as listener:
            while True:
                with self._changed:
                    if self._closed:
                        return False
                    flushed = worker.channel.flush()
                listener.wait(_TICK, flushed=flushed)
                ended = worker.ended
                try:
                    messages = worker.channel.receive()
                except EOFError:
                    return False
                for told in messages:
                    self._tell(told)
                    with self._changed:
                        self._open.difference_update(ended.number for ended in told.ended)
                        self._marked.update(told.marks)
                        self._changed.notify_all()
                if ended and not messages:  # a forked copy of this process may keep the channel open
                    return False
                # A long look is one during which this process, and maybe the other one, was stopped.
                silence = 0.0 if messages else silence + min(time.monotonic() - looked, 2 * _TICK)
                looked = time.monotonic()
                if silence > SILENCE:
                    return True
