"""Reward functions in processes that can be killed: what `reward_workers` and `reward_timeout` do.

Guarantees:
- each function is called once per group, on the main thread of one of the workers, with the arguments that
  `RewardScorer` passes;
- a worker that exceeds the timeout or dies is replaced. Its group is rejected, with a reason that names the function,
  or gets the value set for missing rewards. Both are counted;
- an exception of a function becomes a `RewardError` that has the worker's traceback as its cause;
- no worker outlives `close`, or this process.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from trl_a3po.errors import RewardError, StallError
from trl_a3po.protocol.records import Group, Rejection, Score
from trl_a3po.rewards.messages import IN_THIS_PROCESS, pickled_functions, pickled_group, pickled_log, unpickled_score
from trl_a3po.rewards.scorer import WHILE_WAITING_SECONDS, is_async, wait_for_result
from trl_a3po.rewards.sent_log import SentLog
from trl_a3po.rewards.worker_process import ABORT_TIMEOUT, KilledAtStart, RewardProcess, WorkerGone
from trl_a3po.workers.process import WorkerProcess
from trl_a3po.workers.running_clock import RunningClock

logger = logging.getLogger(__name__)

MODULE = "trl_a3po.rewards.worker"
START_ATTEMPTS = 3  # workers in a row that may be killed while they start
CLOSE_TIMEOUT = 1.0  # seconds for idle workers to end by themselves


class RewardWorkers:
    """`workers(group) -> Score | Rejection`, from any thread, as many groups at a time as there are workers.

    Args:
        funcs: reward functions, in the order of the columns of the rewards. `None` stands for a column that is
            computed elsewhere. It is NaN here.
        names: one name per function, for messages and outcomes.
        decode: group -> its completions, as text or as messages.
        state: group -> a namespace, the snapshot of the trainer's state that its reward functions receive. It must be
            picklable, and have a `log_history`. What a worker does not have of it is sent when a function reads it
            there.
        workers: number of processes.
        timeout: seconds that the functions may take for one group, counted from when a worker is ready for it.
        on_timeout: reward that each completion gets from a function that did not finish; `None` rejects the group.
        stall_timeout: seconds after which `score_all` gives up on a group.
        processes: how many processes the run has, of which one alone has reward workers.
        otherwise: for messages, what else to do about a function that cannot be pickled or loaded.
        clock: of `stall_timeout`; `None` stands for one that stands still while this process is stopped.

    Raises:
        RewardError: a function cannot be pickled.
    """

    def __init__(
        self,
        funcs: Sequence[Callable[..., Any] | None],
        names: Sequence[str],
        decode: Callable[[Group], list[Any]],
        state: Callable[[Group], SimpleNamespace],
        *,
        workers: int,
        timeout: float | None = None,
        on_timeout: float | None = None,
        stall_timeout: float = 600.0,
        processes: int = 1,
        otherwise: str = IN_THIS_PROCESS,
        clock: Callable[[], float] | None = None,
    ):
        self._clock = RunningClock(2 * WHILE_WAITING_SECONDS) if clock is None else clock
        self._functions = pickled_functions(funcs, names, otherwise)
        self._processes = processes
        self._otherwise = otherwise
        self._names = list(names)
        present = [(column, func) for column, func in enumerate(funcs) if func is not None]
        self._in_turn = [column for column, func in present if not is_async(func)]
        self._together = [column for column, func in present if is_async(func)]
        self._decode = decode
        self._state = state
        self._num_workers = workers
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._stall_timeout = stall_timeout
        self._decoding = threading.Lock()
        self._log = SentLog()
        self._changed = threading.Condition()  # guards everything below
        self._idle: list[RewardProcess] = []
        self._busy: set[RewardProcess] = set()
        self._closed = False
        self._timeouts = 0
        self._crashes = 0
        # Linux ends a worker when the thread that started it ends, so a thread that stays alive starts them all.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="a3po reward workers")

    def start(self) -> None:
        """Start the workers; they load the functions while the first group is being sampled."""
        started = [self._start() for _ in range(self._num_workers)]
        with self._changed:
            self._idle += started
            self._changed.notify_all()

    @property
    def timeouts(self) -> int:
        """How many groups had their worker killed at `timeout`."""
        with self._changed:
            return self._timeouts

    @property
    def crashes(self) -> int:
        """How many groups had their worker die."""
        with self._changed:
            return self._crashes

    def __call__(self, group: Group) -> Score | Rejection:
        """Score a group. Waits for a free worker.

        Raises:
            RewardError: a function raised, or returned something else than one number or `None` per completion; or the
                workers cannot be started, or are closed.
        """
        with self._decoding:
            completions = self._decode(group)
        state = self._state(group)
        log = vars(state).pop("log_history")
        message = pickled_group(group, completions, state)
        for _ in range(START_ATTEMPTS - 1):
            try:
                return self._score(group, message, log)
            except KilledAtStart as killed:
                logger.warning("%s\nAnother one is started.", killed)
        return self._score(group, message, log)

    def _score(self, group: Group, message: bytes, log: list[dict[str, Any]]) -> Score | Rejection:
        worker = self._borrow()
        try:
            self._make_ready(worker)

            def added_to_log() -> bytes:
                return pickled_log(*self._log.addition(log, worker.known_log))

            return unpickled_score(worker.score(message, added_to_log, self._timeout), group)
        except WorkerGone as gone:
            return self._result_without_worker(worker, group, gone)
        finally:
            self._give_back(worker)

    def wait_until_ready(self) -> None:
        """Return when a worker that is free has loaded the functions.

        Raises:
            RewardError: the functions cannot be loaded, or the workers are closed.
        """
        worker = self._borrow()
        try:
            self._make_ready(worker)
        finally:
            self._give_back(worker)

    def starting(self) -> bool:
        """Whether a group waits for a worker that imports what the functions need. A start has a limit of its own, so
        it counts towards no other one. From any thread."""
        with self._changed:
            return any(not worker.ready for worker in self._busy)

    def describe(self) -> str:
        """What would help if the functions hang; empty if no worker is busy. From any thread."""
        with self._changed:
            busy = len(self._busy)
        if not busy:
            return ""
        advice = (
            "set a reward_timeout below stall_timeout, at which a hanging function is killed"
            if self._timeout is None
            else f"set stall_timeout above reward_timeout={self._timeout:g}, or lower reward_timeout"
        )
        return f"{busy} of {self._num_workers} reward workers are scoring a group: {advice}."

    def score_all(
        self, groups: Sequence[Group], while_waiting: Callable[[], None] = lambda: None
    ) -> list[Score | Rejection]:
        """Score groups, as many at a time as there are workers.

        Args:
            groups: the groups to score.
            while_waiting: called repeatedly, at least every 20 seconds.

        Raises:
            StallError: a group got no reward within `stall_timeout` seconds.
            RewardError: as for one group.
        """
        pool = ThreadPoolExecutor(self._num_workers)
        try:
            futures = [pool.submit(self, group) for group in groups]
            return [self._result(future, while_waiting) for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def stopped(self) -> str:
        """Which worker was stopped while it scores, and how it goes on, or an empty text. From any thread."""
        with self._changed:
            processes = [worker.process for worker in self._busy]
        return "; ".join(f"a reward worker {each.how_to_continue}" for each in processes if each.is_stopped)

    def close(self) -> None:
        """End the workers, whatever they are doing. A thread that waits for a worker gets a `RewardError`. Idempotent;
        takes bounded time."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.process.kill()
            self._changed.notify_all()
        for worker in idle:
            worker.process.channel.shutdown()
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for worker in idle:
            worker.process.reap(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, CLOSE_TIMEOUT + ABORT_TIMEOUT)
        self._starter.shutdown(wait=False)

    def _result(self, future: "Future[Score | Rejection]", while_waiting: Callable[[], None]) -> Score | Rejection:
        began, started = self._clock(), False

        def seconds_left() -> float:
            nonlocal began, started
            starting = self.starting()
            if starting or started:
                began = self._clock()
            started = starting
            return self._stall_timeout - (self._clock() - began)

        try:
            return wait_for_result(future, seconds_left, while_waiting)
        except TimeoutError:
            raise StallError(
                f"The reward of an evaluation's group has not come within stall_timeout={self._stall_timeout:g} s. "
                f"{self.describe()}"
            ) from None

    # --- one group ----------------------------------------------------------------------------------------------

    def _make_ready(self, worker: RewardProcess) -> None:
        try:
            worker.wait_until_ready()
        except RewardError:
            self._raise_if_closed()  # closing has ended it
            raise

    def _result_without_worker(self, worker: RewardProcess, group: Group, gone: WorkerGone) -> Score | Rejection:
        """The result of a group whose worker has ended: a rejection, or the value set for missing rewards."""
        self._raise_if_closed()
        with self._changed:
            self._timeouts += gone.overdue
            self._crashes += not gone.overdue
        missing = [column for column in [*self._in_turn, *self._together] if column not in gone.columns]
        running = [column for column in missing if column in self._in_turn][:1] or missing
        names = " and ".join(repr(self._names[column]) for column in running) or "its last step"
        reason = f"reward timeout in {names}" if gone.overdue else f"reward worker died in {names} ({gone.how})"
        logger.warning(
            "Prompt %d: %s%s; %s. The worker printed:\n%s",
            group.prompt.index,
            reason,
            f" (reward_timeout={self._timeout:g} s)" if gone.overdue else "",
            "the group is rejected"
            if self._on_timeout is None
            else f"each missing reward is reward_on_timeout={self._on_timeout:g}",
            worker.process.output_tail or "(nothing)",
        )
        if self._on_timeout is None:
            return Rejection(reason, self._remedy(gone))
        columns = gone.columns | {column: [self._on_timeout] * len(group.rollouts) for column in missing}
        rewards = [
            [columns[column][row] if column in columns else math.nan for column in range(len(self._names))]
            for row in range(len(group.rollouts))
        ]
        return Score(rewards, seconds=gone.seconds)

    def _remedy(self, gone: WorkerGone) -> str:
        if gone.overdue:
            return f"make the function return within reward_timeout={self._timeout:g} s, or raise reward_timeout"
        return "find out why the function ends its process (out of memory, an exit), or set reward_on_timeout"

    # --- the workers --------------------------------------------------------------------------------------------

    def _start(self) -> RewardProcess:
        process = self._starter.submit(WorkerProcess, MODULE, shows_output=True).result()
        return RewardProcess(process, self._functions, self._names, self._processes, self._otherwise)

    def _borrow(self) -> RewardProcess:
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._closed)
            self._raise_if_closed()
            worker = self._idle.pop()
            self._busy.add(worker)
            return worker

    def _give_back(self, worker: RewardProcess) -> None:
        """Make the worker idle again, or, if it has ended, another worker in its place."""
        with self._changed:
            closed = self._closed
        free = worker if not worker.ended or closed else self._start()
        with self._changed:
            closed = self._closed
            if not closed:
                self._idle.append(free)
        if closed:
            free.end()
        with self._changed:
            self._busy.discard(worker)
            self._changed.notify_all()

    def _raise_if_closed(self) -> None:
        with self._changed:
            if self._closed:
                raise RewardError("The reward workers are closed.")
