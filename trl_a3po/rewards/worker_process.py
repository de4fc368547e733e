"""One reward worker as the training process sees it: loading the functions, scoring a group, and its end.

Guarantees: a call of a worker gives an answer or an error that says how the worker ended, and then the process has
ended; an error of a reward function comes with the worker's traceback.
"""

import time
from collections.abc import Callable
from typing import Any

from trl_a3po.errors import RewardError
from trl_a3po.rewards.users_frames import script_file
from trl_a3po.workers.process import WorkerProcess
from trl_a3po.workers.reading import WorkerEnded, WorkerUnusable, read_messages

START_TIMEOUT = 300.0  # seconds for a worker to import and load the functions
ABORT_TIMEOUT = 1.0  # seconds for an overdue worker to print its stacks
END_TIMEOUT = 2.0  # seconds for a worker that has closed its socket to end


class RewardTraceback(Exception):
    """The traceback of an exception in a reward worker, as text."""


class KilledAtStart(RewardError):
    """The worker was killed while it loaded the functions, which says nothing about them."""


class WorkerGone(Exception):
    """The worker has ended before it scored a group.

    Args:
        overdue: it was ended because it had not answered in time.
        how: how the process ended.
        columns: the rewards it had reported, by column.
        seconds: time since it was given the group.
    """

    def __init__(self, overdue: bool, how: str, columns: dict[int, list[float]], seconds: float) -> None:
        self.overdue = overdue
        self.how = how
        self.columns = columns
        self.seconds = seconds


class RewardProcess:
    """A process that loads reward functions and then scores groups. One thread at a time may use it.

    Args:
        process: a process that runs the module `trl_a3po.rewards.worker`.
        functions: what `pickled_functions` returned.
        names: a name per function.
        processes: how many processes the run has.
        otherwise: for messages, what to do if the functions cannot be loaded.
    """

    def __init__(
        self, process: WorkerProcess, functions: bytes, names: list[str], processes: int, otherwise: str
    ) -> None:
        self.process = process
        self._otherwise = otherwise
        self.ended = self.ready = False
        self.known_log: list[dict[str, Any]] = []
        process.channel.send((functions, names, processes, script_file()))

    def wait_until_ready(self) -> None:
        """Return when the functions are loaded.

        Raises:
            RewardError: the functions cannot be loaded, or the worker ended while it loaded them; `KilledAtStart` if
                it was killed.
        """
        if self.ready:
            return
        try:
            message = next(read_messages(self.process, timeout=START_TIMEOUT))
        except (TimeoutError, WorkerEnded, WorkerUnusable) as reason:
            how = self._end(reason)
            killed = isinstance(reason, WorkerEnded) and self.process.was_killed
            late = f"was not ready after {START_TIMEOUT:g} seconds"
            raise (KilledAtStart if killed else RewardError)(
                f"A reward worker {late if isinstance(reason, TimeoutError) else f'ended ({how})'} while it loaded "
                f"the reward functions. It printed:\n{self.process.output_tail or '(nothing)'}"
            ) from None
        if message[0] == "failed":
            raise RewardError(f"{message[1]} To avoid it, {self._otherwise}.") from RewardTraceback(message[2])
        self.ready = True

    def score(self, group: bytes, added_to_log: Callable[[], bytes], timeout: float | None) -> bytes:
        """The pickled score of a pickled group, by a worker that is ready.

        Args:
            group: what `pickled_group` returned.
            added_to_log: what to send when the worker asks for the log, as `pickled_log` returns it.
            timeout: seconds for all of it.

        Raises:
            RewardError: a function raised, or returned something else than one number or `None` per completion.
            WorkerGone: `timeout` seconds have passed, or the worker died.
        """
        self.process.channel.send(group)
        began = time.monotonic()
        columns: dict[int, list[float]] = {}
        try:
            for message in read_messages(self.process, timeout=timeout):
                match message:
                    case ("column", column, values):
                        columns[column] = values
                    case ("log",):
                        self.process.channel.send(self._pickled(added_to_log))
                    case ("scored", bytes(score)):
                        return score
                    case ("failed", what, traceback):
                        raise RewardError(what) from RewardTraceback(traceback)
        except (TimeoutError, WorkerEnded, WorkerUnusable) as reason:
            overdue = isinstance(reason, TimeoutError)
            how = self._end(reason, abort=overdue)
            raise WorkerGone(overdue, how, columns, time.monotonic() - began) from None
        raise AssertionError("read_messages ends with an exception")

    def _pickled(self, added_to_log: Callable[[], bytes]) -> bytes:
        try:
            return added_to_log()
        except RewardError:
            self.end()  # it waits for what cannot be sent
            raise

    def end(self) -> None:
        """Kill the process and free what it held. Idempotent."""
        if not self.ended:
            self._end(None)

    def _end(self, reason: Exception | None, *, abort: bool = False) -> str:
        """End the process. Returns how it ended. With `abort`, it prints the stacks of its threads first."""
        self.ended = True
        self.process.shows_output = False
        if abort:
            self.process.abort()
        if isinstance(reason, WorkerUnusable):
            return self.process.reap(0.0, fault=str(reason))
        if isinstance(reason, WorkerEnded):
            return self.process.reap(END_TIMEOUT)
        return self.process.reap(ABORT_TIMEOUT if abort else 0.0)
