"""Reward functions in processes that can be killed: what `reward_workers` and `reward_timeout` do.

Guarantees: each function is called once per group, on the main thread of one of the workers, with what `RewardScorer`
passes; a worker that is overdue or dies is replaced, and its group ends as a `Rejection` that names the function, or
with the value set for missing rewards: counted either way; what a function raises is a `RewardError`, with the
worker's traceback as its cause; no worker outlives `close`, or this process.
"""

import logging
import pickle
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cloudpickle

from trl_a3po.engines.embedded.process import WorkerProcess
from trl_a3po.errors import RewardError, StallError
from trl_a3po.rollout.outcomes import Rejection
from trl_a3po.rollout.records import Group, Score
from trl_a3po.rollout.rewards import WAITING_SECONDS, is_async

logger = logging.getLogger(__name__)

MODULE = "trl_a3po.rollout.reward_worker"
START_SECONDS = 300.0  # for the imports of the functions
ABORT_SECONDS = 1.0  # for the last words of an overdue worker
CLOSE_SECONDS = 1.0  # for idle workers to leave by themselves
TICK = 0.2


class RewardTraceback(Exception):
    """The traceback of an exception in a reward worker, as text."""


class RewardWorkers:
    """`workers(group) -> Score | Rejection`, from any thread, as many groups at a time as there are workers.

    Args:
        funcs: reward functions, in the order of the rewards' columns; `None` marks a column that is computed
            elsewhere and stays NaN.
        names: a name per function, for messages and outcomes.
        decode: group -> its completions, as text or as messages.
        state: group -> the snapshot of the trainer's state that its reward functions get; it can be pickled.
        workers: processes.
        timeout: seconds the functions may take for one group, from when a worker is ready for it.
        on_timeout: reward of each completion where a function did not end; `None` rejects the group instead.
        stall_timeout: seconds after which `score_all` gives up on a group.

    Raises:
        RewardError: a function cannot be pickled.
    """

    def __init__(
        self,
        funcs: Sequence[Callable[..., Any] | None],
        names: Sequence[str],
        decode: Callable[[Group], list[Any]],
        state: Callable[[Group], Any],
        *,
        workers: int,
        timeout: float | None = None,
        on_timeout: float | None = None,
        stall_timeout: float = 600.0,
    ):
        self._functions = pickled(funcs, names)
        self._names = list(names)
        here = [column for column, func in enumerate(funcs) if func is not None]
        self._in_turn = [column for column in here if not is_async(funcs[column])]
        self._together = [column for column in here if is_async(funcs[column])]
        self._decode = decode
        self._state = state
        self._number = workers
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._stall_timeout = stall_timeout
        self._decoding = threading.Lock()
        self._changed = threading.Condition()  # guards everything below
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._closed = False
        self._timeouts = 0
        self._crashes = 0
        # Linux ends a worker with the thread that started it, so one thread that stays starts them all.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="a3po reward workers")

    def start(self) -> None:
        """Start the workers; they load the functions while the first group is being sampled."""
        started = [self._start() for _ in range(self._number)]
        with self._changed:
            self._idle += started
            self._changed.notify_all()

    @property
    def timeouts(self) -> int:
        """Groups whose worker was killed at `timeout`."""
        with self._changed:
            return self._timeouts

    @property
    def crashes(self) -> int:
        """Groups whose worker died."""
        with self._changed:
            return self._crashes

    def __call__(self, group: Group) -> Score | Rejection:
        """Score a group; waits for a free worker.

        Raises:
            RewardError: a function raised or returned something that is not one number per completion, or the
                workers cannot be started, or are closed.
        """
        payload = self._payload(group)
        worker = self._borrow()
        try:
            return self._score(worker, group, payload)
        except _Gone as gone:
            return self._without(worker, group, gone)
        finally:
            self._give_back(worker)

    def describe(self) -> str:
        """What would help if the functions hang; empty if no worker is busy. From any thread."""
        with self._changed:
            busy = len(self._busy)
        if not busy:
            return ""
        advice = (
            "set a reward_timeout below stall_timeout, at which a hanging function is killed"
            if self._timeout is None
            else f"set stall_timeout above reward_timeout={self._timeout:g}, or lower that"
        )
        return f"{busy} of {self._number} reward workers are at a group: {advice}."

    def score_all(
        self, groups: Sequence[Group], while_waiting: Callable[[], None] = lambda: None
    ) -> list[Score | Rejection]:
        """Score groups, as many at a time as there are workers.

        Args:
            while_waiting: called every now and then, at least every 20 seconds.

        Raises:
            StallError: no reward came for `stall_timeout` seconds.
        """
        pool = ThreadPoolExecutor(self._number)
        try:
            futures = [pool.submit(self, group) for group in groups]
            return [self._result(future, while_waiting) for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End the workers, whatever they are at; whoever waits for one gets a `RewardError`. Idempotent, bounded."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.process.kill()
            self._changed.notify_all()
        for worker in idle:
            worker.process.channel.shutdown()
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in idle:
            worker.process.bury(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, CLOSE_SECONDS + ABORT_SECONDS)
        self._starter.shutdown(wait=False)

    def _result(self, future: "Future[Score | Rejection]", while_waiting: Callable[[], None]) -> Score | Rejection:
        deadline = time.monotonic() + self._stall_timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return future.result(min(left, WAITING_SECONDS))
            except TimeoutError:
                if left == 0.0:
                    raise StallError(
                        f"An evaluation's reward has not come for stall_timeout={self._stall_timeout:g} s. "
                        f"{self.describe()}"
                    ) from None
            while_waiting()

    # --- one group ----------------------------------------------------------------------------------------------

    def _payload(self, group: Group) -> bytes:
        with self._decoding:
            completions = self._decode(group)
        try:
            return cloudpickle.dumps((group, completions, self._state(group)))
        except Exception as error:
            raise RewardError(
                f"Prompt {group.prompt.index} cannot be sent to a reward worker: {error!r}. Keep plain values in the "
                "dataset's columns, or set reward_workers=0."
            ) from error

    def _score(self, worker: "_Worker", group: Group, payload: bytes) -> Score:
        self._await_ready(worker)
        worker.process.channel.send(payload)
        began, columns = time.monotonic(), {}
        try:
            for message in worker.messages(self._timeout):
                match message:
                    case ("column", column, values):
                        columns[column] = values
                    case ("scored", score):
                        return self._unpickled(score, group)
                    case ("failed", what, traceback):
                        raise RewardError(what) from RewardTraceback(traceback)
        except (TimeoutError, EOFError) as reason:
            overdue = isinstance(reason, TimeoutError)
            end = worker.end(ABORT_SECONDS if overdue else 0.0, abort=overdue)
            raise _Gone(overdue, end, columns, time.monotonic() - began) from None
        raise AssertionError("a worker's messages have no end")

    def _unpickled(self, score: bytes, group: Group) -> Score:
        try:
            return pickle.loads(score)
        except Exception as error:
            raise RewardError(
                f"What log_extra recorded for prompt {group.prompt.index} cannot be loaded in the training process: "
                f"{error!r}. Record numbers or text, or set reward_workers=0."
            ) from error

    def _await_ready(self, worker: "_Worker") -> None:
        if worker.ready:
            return
        try:
            for message in worker.messages(START_SECONDS):
                if message[0] == "failed":
                    raise RewardError(f"{message[1]} Set reward_workers=0.") from RewardTraceback(message[2])
                worker.ready = True
                return
        except (TimeoutError, EOFError) as reason:
            end = worker.end(0.0)
            self._raise_if_closed()
            late = f"was not ready after {START_SECONDS:g} seconds"
            raise RewardError(
                f"A reward worker {late if isinstance(reason, TimeoutError) else f'ended ({end})'} while it loaded "
                f"the reward functions. It printed:\n{worker.process.last_words or '(nothing)'}"
            ) from None

    def _without(self, worker: "_Worker", group: Group, gone: "_Gone") -> Score | Rejection:
        """What becomes of a group whose worker is gone."""
        self._raise_if_closed()
        with self._changed:
            self._timeouts += gone.overdue
            self._crashes += not gone.overdue
        missing = [column for column in [*self._in_turn, *self._together] if column not in gone.columns]
        running = [column for column in missing if column in self._in_turn][:1] or missing
        names = " and ".join(repr(self._names[column]) for column in running) or "its last step"
        reason = f"reward timeout in {names}" if gone.overdue else f"reward worker died in {names} ({gone.end})"
        logger.warning(
            "Prompt %d: %s%s; %s. The worker printed:\n%s",
            group.prompt.index,
            reason,
            f" (reward_timeout={self._timeout:g} s)" if gone.overdue else "",
            "the group is rejected"
            if self._on_timeout is None
            else f"each missing reward is reward_on_timeout={self._on_timeout:g}",
            worker.process.last_words or "(nothing)",
        )
        if self._on_timeout is None:
            return Rejection(reason, self._remedy(gone))
        columns = gone.columns | {column: [self._on_timeout] * len(group.rollouts) for column in missing}
        rewards = [
            [columns[column][row] if column in columns else float("nan") for column in range(len(self._names))]
            for row in range(len(group.rollouts))
        ]
        return Score(rewards, seconds=gone.seconds)

    def _remedy(self, gone: "_Gone") -> str:
        if gone.overdue:
            return f"have the function end within reward_timeout={self._timeout:g} s, or raise reward_timeout"
        return "find out why the function ends its process (memory, an exit), or set reward_on_timeout"

    # --- the workers --------------------------------------------------------------------------------------------

    def _start(self) -> "_Worker":
        worker = _Worker(self._starter.submit(WorkerProcess, MODULE, shows_output=True).result())
        worker.process.channel.send((self._functions, self._names))
        return worker

    def _borrow(self) -> "_Worker":
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._closed)
            self._raise_if_closed()
            worker = self._idle.pop()
            self._busy.add(worker)
            return worker

    def _give_back(self, worker: "_Worker") -> None:
        """The worker, or another in its place, is free again."""
        with self._changed:
            closed = self._closed
        free = worker if not worker.ended or closed else self._start()
        with self._changed:
            if not self._closed:
                self._idle.append(free)
                free = None
        if free is not None:
            free.end(0.0)
        with self._changed:
            self._busy.discard(worker)
            self._changed.notify_all()

    def _raise_if_closed(self) -> None:
        with self._changed:
            if self._closed:
                raise RewardError("The reward workers are closed.")


class _Worker:
    """A process, and whether it has loaded the functions. One thread at a time has it."""

    def __init__(self, process: WorkerProcess):
        self.process = process
        self.ready = False
        self.ended = False

    def messages(self, timeout: float | None) -> Iterator[tuple]:
        """What the worker says from now on, without an end.

        Raises:
            TimeoutError: `timeout` seconds have passed.
            EOFError: the worker has ended, and said nothing more.
        """
        channel, output = self.process.channel, self.process.output_fd
        deadline = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            while True:
                flushed = channel.flush()
                selector.modify(channel, selectors.EVENT_READ | (0 if flushed else selectors.EVENT_WRITE))
                ended = self.process.ended  # a child of its own may keep the socket open
                left = TICK if deadline is None else deadline - time.monotonic()
                for key, _ in selector.select(0 if ended else max(0.0, min(TICK, left))):
                    if key.fileobj == output and not self.process.read_output():
                        selector.unregister(output)
                messages = channel.receive()
                yield from messages
                if ended and not messages:
                    raise EOFError
                if left <= 0:
                    raise TimeoutError

    def end(self, grace: float, *, abort: bool = False) -> str:
        """End the process and free what it held; how it ended. `abort` has it print where it is first."""
        if self.ended:
            return "it was ended before"
        self.ended = True
        self.process.shows_output = False
        if abort:
            self.process.abort()
        return self.process.bury(grace)


class _Gone(Exception):
    """The worker is gone: overdue, or dead by itself.

    `end` is how it ended, `columns` the rewards it had reported, `seconds` since it was given the group.
    """

    def __init__(self, overdue: bool, end: str, columns: dict[int, list[float]], seconds: float):
        self.overdue = overdue
        self.end = end
        self.columns = columns
        self.seconds = seconds


def pickled(funcs: Sequence[Callable[..., Any] | None], names: Sequence[str]) -> bytes:
    """The functions as reward workers get them: together, so that what they share stays shared.

    Raises:
        RewardError: one cannot be pickled.
    """
    try:
        return cloudpickle.dumps(list(funcs))
    except Exception as error:
        for func, name in zip(funcs, names, strict=True):
            try:
                cloudpickle.dumps(func)
            except Exception as reason:
                raise RewardError(
                    f"The reward function '{name}' cannot be sent to a reward worker: {reason!r}. Create what cannot "
                    "be pickled inside the function, or set reward_workers=0, which runs it in this process."
                ) from reason
        raise RewardError(
            f"The reward functions cannot be sent to a reward worker: {error!r}. Set reward_workers=0, which runs "
            "them in this process."
        ) from error
