"""One reward worker as the training process sees it: loading the functions, scoring a group, its end.

Guarantees: a worker answers, or is ended and says how; what a function raised comes with the worker's traceback.
"""

import time
from collections.abc import Iterator

from trl_a3po.errors import RewardError
from trl_a3po.workers.listener import Listener
from trl_a3po.workers.process import WorkerProcess

START_SECONDS = 300.0  # for the imports of the functions
ABORT_SECONDS = 1.0  # for the last words of an overdue worker
TICK = 0.2


class RewardTraceback(Exception):
    """The traceback of an exception in a reward worker, as text."""


class WorkerGone(Exception):
    """The worker is gone: overdue, or dead by itself.

    `end` is how it ended, `columns` the rewards it had reported, `seconds` since it was given the group.
    """

    def __init__(self, overdue: bool, end: str, columns: dict[int, list[float]], seconds: float):
        self.overdue = overdue
        self.end = end
        self.columns = columns
        self.seconds = seconds


class RewardProcess:
    """A process that loads the functions it is given, and then scores groups. One thread at a time has it.

    Args:
        process: started with the module `reward_worker`.
        functions: `pickled_functions`.
        names: of the functions.
    """

    def __init__(self, process: WorkerProcess, functions: bytes, names: list[str]):
        self.process = process
        self.ended = False
        self._ready = False
        process.channel.send((functions, names))

    def wait_until_ready(self) -> None:
        """Return when the functions are loaded.

        Raises:
            RewardError: they cannot be, or the worker has ended meanwhile.
        """
        if self._ready:
            return
        try:
            message = next(self._messages(START_SECONDS))
        except (TimeoutError, EOFError) as reason:
            end = self.end(0.0)
            late = f"was not ready after {START_SECONDS:g} seconds"
            raise RewardError(
                f"A reward worker {late if isinstance(reason, TimeoutError) else f'ended ({end})'} while it loaded "
                f"the reward functions. It printed:\n{self.process.last_words or '(nothing)'}"
            ) from None
        if message[0] == "failed":
            raise RewardError(f"{message[1]} Set reward_workers=0.") from RewardTraceback(message[2])
        self._ready = True

    def score(self, group: bytes, timeout: float | None) -> bytes:
        """The pickled score of a pickled group, by a worker that is ready.

        Raises:
            RewardError: a function raised, or returned something that is not one number per completion.
            WorkerGone: `timeout` seconds have passed, or the worker died.
        """
        self.process.channel.send(group)
        began, columns = time.monotonic(), {}
        try:
            for message in self._messages(timeout):
                match message:
                    case ("column", column, values):
                        columns[column] = values
                    case ("scored", score):
                        return score
                    case ("failed", what, traceback):
                        raise RewardError(what) from RewardTraceback(traceback)
        except (TimeoutError, EOFError) as reason:
            overdue = isinstance(reason, TimeoutError)
            end = self.end(ABORT_SECONDS if overdue else 0.0, abort=overdue)
            raise WorkerGone(overdue, end, columns, time.monotonic() - began) from None
        raise AssertionError("a worker's messages have no end")

    def end(self, grace: float, *, abort: bool = False) -> str:
        """End the process and free what it held; how it ended. `abort` has it print where it is first."""
        if self.ended:
            return "it was ended before"
        self.ended = True
        self.process.shows_output = False
        if abort:
            self.process.abort()
        return self.process.bury(grace)

    def _messages(self, timeout: float | None) -> Iterator[tuple]:
        """What the worker says from now on, without an end.

        Raises:
            TimeoutError: `timeout` seconds have passed.
            EOFError: the worker has ended, and said nothing more.
        """
        channel = self.process.channel
        deadline = None if timeout is None else time.monotonic() + timeout
        with Listener(self.process) as listener:
            while True:
                flushed = channel.flush()
                ended = self.process.ended  # a child of its own may keep the socket open
                left = TICK if deadline is None else deadline - time.monotonic()
                listener.wait(0.0 if ended else max(0.0, min(TICK, left)), flushed=flushed)
                messages = channel.receive()
                yield from messages
                if ended and not messages:
                    raise EOFError
                if left <= 0:
                    raise TimeoutError
