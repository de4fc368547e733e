"""Scoring a finished group with the user's reward functions, called as GRPOTrainer calls them.

Guarantees:
- each function is called once per group, with the keyword arguments that GRPOTrainer documents;
- synchronous and `async def` functions keep their state between calls: they are called in one thread, with one event
  loop;
- each function receives its own copies of prompts, completions and columns, which it may change;
- a function returns one finite number or `None` per completion, or a `RewardError` names the function and says what it
  did;
- a function that hangs blocks the thread that called it, and no other thread for longer than the timeout of
  `score_all`;
- a function that asks for what only a main thread has, such as `signal.signal`, or changes what belongs to the whole
  process, such as the working directory or a seed, gets a process of its own: what it did in the thread for that group
  is discarded, and the group is scored again for that function alone. If the function cannot be sent to a process, the
  first kind is an error, and the second stays in the thread with a warning;
- a function that waits for the other processes of the run is an error;
- `interrupt` ends a function that is being awaited, and no function is called after it;
- a function that holds the interpreter lock is the only one for which no timeout applies. Between `start` and `close`,
  the `watchdog` ends the process then.
"""

import asyncio
import inspect
import itertools
import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from trl_a3po.errors import RewardError, StallError
from trl_a3po.protocol.plain_copy import plain_copy
from trl_a3po.protocol.records import Group, Rejection, Score
from trl_a3po.rewards.stand_ins import Kind
from trl_a3po.rewards.thread import NAME, CallingThread, EventLoop, RewardThread, end_forked_child
from trl_a3po.rewards.values import reward_values
from trl_a3po.rewards.watch import Watch, limits_time_in_main_thread_only, watch
from trl_a3po.workers.running_clock import RunningClock
from trl_a3po.workers.thread_stacks import thread_stacks
from trl_a3po.workers.watchdog import Watchdog
from trl_a3po.workers.watchdog_process import GRACE_SECONDS, Note

if TYPE_CHECKING:
    from trl_a3po.rewards.worker_pool import RewardWorkers

logger = logging.getLogger(__name__)

FREEZES = (
    "Set reward_workers=1 and a reward_timeout, which has a process call the reward functions that is killed and "
    "replaced when it hangs."
)
TIME_LIMITS = Kind.MAIN_THREAD.value.format("math-verify's time limits")
COLLECTIVES = (
    "Compute the reward from the group's own completions; scale_rewards='batch' scales advantages over all groups of "
    "a batch."
)
CLOSE_TIMEOUT = 1.0  # seconds for a group that is being scored
WHILE_WAITING_SECONDS = 10.0  # between two calls of `while_waiting`
RESERVED = ("prompt", "completion", "completion_ids")

THREAD_HINT = (
    f" Reward functions are called in the thread '{NAME}': create what belongs to one thread inside the function, at "
    "its first call. sqlite3.connect(..., check_same_thread=False) makes a connection for every thread."
)

Functions = dict[int, Callable[..., Any]]  # by column
Result = TypeVar("Result")


@dataclass
class FunctionCall:
    """One call of a reward function: what it logged, and the rewards it returned."""

    column: int
    watched: Watch = field(default_factory=Watch)
    extra_columns: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    metrics: list[tuple[str, float]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        self.extra_columns[column].extend(values)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))


class RewardScorer:
    """`scorer(group) -> Score | Rejection`, one group at a time, from any thread. Only a function in a process of its
    own can cause a rejection.

    Args:
        funcs: reward functions, in the order of the columns of the rewards. `None` stands for a column that is
            computed elsewhere, by a reward model. It is NaN here.
        names: one name per function, for messages.
        decode: group -> its completions, as text or as messages.
        state: group -> the snapshot of the trainer's state that its reward functions receive.
        on_column: called with a column's number and its G rewards as soon as they are known. The columns of the
            `async def` functions are known at the same time, after the others.
        timeout: seconds that the functions may take for one group of `score_all`. `None` stands for `stall_timeout`.
        stall_timeout: the timeout of `score_all` if there is no `timeout`.
        own_process: column -> a process for its function, not started. It raises `RewardError` if the function cannot
            be sent there. Needed only where scoring is not on the main thread.
        thread: where the functions are called; `None` for a thread of this scorer.
        watchdog: whether to have one while functions may run in a thread.
        environments: group -> the environments of its episodes, `None` if there are none.
        processes: how many processes the run has, of which this one alone calls the functions.
        clock: of the limits; it stands still while this process is stopped. `None` stands for a clock of this scorer.
    """

    def __init__(
        self,
        funcs: Sequence[Callable[..., Any] | None],
        names: Sequence[str],
        decode: Callable[[Group], list[Any]],
        state: Callable[[Group], Any],
        on_column: Callable[[int, list[float]], None] | None = None,
        timeout: float | None = None,
        stall_timeout: float = 600.0,
        own_process: "Callable[[int], RewardWorkers] | None" = None,
        thread: RewardThread | CallingThread | None = None,
        watchdog: bool = False,
        environments: Callable[[Group], list[Any] | None] = lambda group: None,
        processes: int = 1,
        clock: Callable[[], float] | None = None,
    ):
        self._clock = RunningClock(2 * WHILE_WAITING_SECONDS) if clock is None else clock
        self._funcs = list(funcs)
        self._names = list(names)
        self._decode = decode
        self._state = state
        self._environments = environments
        self._on_column = on_column
        self._timeout_name = "stall_timeout" if timeout is None else "reward_timeout"
        self._timeout = stall_timeout if timeout is None else timeout
        self._thread = RewardThread() if thread is None else thread
        self._awaited: asyncio.Task[Any] | None = None  # runs the `async def` functions
        self._interrupted = threading.Event()
        self._began: float | None = None  # when scoring the present group began
        self._running: list[int] = []  # the columns that are being computed
        self._own_process = own_process
        self._process = os.getpid()
        self._moved: dict[int, RewardWorkers] = {}  # the processes of functions that cannot run in a thread
        self._in_process: RewardWorkers | None = None  # the one of them that is scoring
        self._uncounted = False  # the time that passes now counts towards no timeout of this scorer
        self._watches: set[Watch] = set()
        self._watchdog = Watchdog(idle_note(stall_timeout)) if watchdog else None
        self._stall_timeout = stall_timeout
        self._processes = processes
        self._tolerated: set[int] = set()  # may act on the whole process, because they cannot be sent to another

    def start(self) -> None:
        """Start the processes of the functions that are known to need one: TRL's rewards that use math-verify, and the
        functions that have asked before."""
        for column, func in enumerate(self._funcs):
            if func is None or self._own_process is None:
                continue
            if limits_time_in_main_thread_only(func) or self._thread.is_moved(func):
                self._move(column, TIME_LIMITS)
        if self._watchdog is not None and any(self._stays(column) for column in range(len(self._funcs))):
            self._watchdog.start()

    @property
    def timeouts(self) -> int:
        """How many groups had the process of a function killed at the timeout."""
        return sum(process.timeouts for process in list(self._moved.values()))

    @property
    def crashes(self) -> int:
        """How many groups had the process of a function die."""
        return sum(process.crashes for process in list(self._moved.values()))

    def seconds(self) -> float:
        """How long the functions have been running for the present group; 0 if there is none, or while no time counts:
        a process starts, or has a timeout of its own. From any thread."""
        if self._uncounted:
            return 0.0
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def starting(self) -> bool:
        """Whether the process of a function is starting, which has a limit of its own. From any thread."""
        in_process = self._in_process
        return in_process is not None and in_process.starting()

    def stopped(self) -> str:
        """Which process of a function was stopped, and how it goes on, or an empty text. From any thread."""
        in_process = self._in_process
        return "" if in_process is None else in_process.stopped()

    def __call__(self, group: Group) -> Score | Rejection:
        return self._submit(group).result()

    def describe(self) -> str:
        """Which function is running and what would help if it hangs; empty if none is running. From any thread."""
        began, running = self._began, self._running
        if began is None or not running:
            return ""
        process = self._in_process
        if process is not None:
            return f"{self._functions(running)} is running in a process of its own. {process.describe()}"
        seconds = f"{self._clock() - began:.1f} s"
        so_far = (
            f"running for {seconds}, in a thread, which cannot be interrupted"
            if self._awaited is None
            else f"awaited for {seconds}"
        )
        return (
            f"{self._functions(running)} has been {so_far}: set reward_workers=1 or more and a reward_timeout, at "
            "which its process is killed and replaced, or, if it needs that long, raise stall_timeout and "
            "reward_timeout."
        )

    def _submit(self, group: Group) -> "Future[Score | Rejection]":
        return self._thread.submit(partial(self._timed_score, group))

    def _timed_score(self, group: Group, loop: EventLoop) -> Score | Rejection:
        self._began = self._clock()
        try:
            return self._score(group, loop)
        finally:
            self._began = None
            self._run([])

    def _run(self, columns: list[int], in_process: "RewardWorkers | None" = None) -> None:
        """Note which functions run now, and where."""
        self._running, self._in_process = columns, in_process
        if self._watchdog is not None:
            in_thread = columns and in_process is None
            names = ", ".join(repr(self._names[column]) for column in columns)
            self._watchdog.note(running_note(names, self._timeout) if in_thread else idle_note(self._stall_timeout))

    def _stays(self, column: int) -> bool:
        """Whether the function runs in the thread."""
        return self._funcs[column] is not None and column not in self._moved

    def _score(self, group: Group, loop: EventLoop) -> Score | Rejection:
        self._raise_if_interrupted()
        started = time.perf_counter()
        size = len(group.rollouts)
        score = Score(rewards=[[math.nan] * len(self._funcs) for _ in range(size)])
        kwargs = self._arguments(group)
        columns = [column for column in range(len(self._funcs)) if self._stays(column)]
        again = [call.column for call in self._calls(columns, kwargs, loop) if not self._settled(score, call)]
        for call in self._calls(again, kwargs, loop):
            self._settled(score, call)
        for column in list(self._moved):
            moved = self._score_in_process(column, group)
            if isinstance(moved, Rejection):
                return moved
            values = [row[0] for row in moved.rewards]
            self._add(score, column, values, moved.extra_columns, moved.metrics)
        for name, logged in score.extra_columns.items():
            if len(logged) != size:
                raise RewardError(
                    f"log_extra({name!r}, ...) recorded {len(logged)} values for a group of {size} completions: "
                    "record one value per completion."
                )
        score.seconds = time.perf_counter() - started
        return score

    def _arguments(self, group: Group) -> dict[str, Any]:
        """The keyword arguments of the functions, except for those that log."""
        size, environments = len(group.rollouts), self._environments(group)
        episodes = [rollout.episode for rollout in group.rollouts if rollout.episode is not None]
        prompts = [episode.prompt for episode in episodes] or [group.prompt.shown] * size
        columns = {name: [value] * size for name, value in group.prompt.example.items()}
        for name in {name for episode in episodes for name in episode.columns}:
            columns[name] = [episode.columns.get(name) for episode in episodes]
        return {name: values for name, values in columns.items() if name not in RESERVED} | {
            **({} if environments is None else {"environments": environments}),
            "prompts": prompts,
            "completions": self._decode(group),
            "completion_ids": [list(rollout.token_ids) for rollout in group.rollouts],
            "trainer_state": self._state(group),
        }

    def _add(
        self,
        score: Score,
        column: int,
        values: list[float],
        extra_columns: dict[str, list[Any]],
        metrics: list[tuple[str, float]],
    ) -> None:
        """Put a function's rewards, and what it logged, into the score."""
        for row, value in zip(score.rewards, values, strict=True):
            row[column] = value
        for name, logged in extra_columns.items():
            score.extra_columns[name] = score.extra_columns.get(name, []) + logged
        score.metrics += metrics
        if self._on_column is not None:
            self._on_column(column, values)

    def _calls(self, columns: list[int], kwargs: dict[str, Any], loop: EventLoop) -> Iterator[FunctionCall]:
        """The calls of these functions in the thread."""
        present = [(column, func) for column in columns if (func := self._funcs[column]) is not None]
        in_turn = {column: func for column, func in present if not is_async(func)}
        together = {column: func for column, func in present if is_async(func)}
        return itertools.chain(self._call_in_turn(in_turn, kwargs, loop), self._await_together(together, kwargs, loop))

    def _settled(self, score: Score, call: FunctionCall) -> bool:
        """Put the rewards of a call into the score, or give the function a process. `False` if the function is to be
        called again."""
        watched, name = call.watched, self._functions([call.column])
        if watched.noticed_kind is Kind.COLLECTIVE:
            raise RewardError(f"{name} {watched.noticed}. {COLLECTIVES}")
        if not watched.noticed:
            self._add(score, call.column, call.values, call.extra_columns, call.metrics)
            return True
        try:
            self._move(call.column, watched.noticed)
        except RewardError as error:
            if watched.noticed_kind is Kind.MAIN_THREAD:
                raise RewardError(f"{name} {watched.noticed}. {error}") from error
            self._tolerated.add(call.column)
            logger.warning("%s %s. %s It stays in the thread for now.", name, watched.noticed, error)
            return False
        return True

    # --- functions in a process of their own --------------------------------------------------------------------

    def _move(self, column: int, why: str) -> None:
        """Give the function its own process.

        Raises:
            RewardError: the function cannot be sent there.
        """
        assert self._own_process is not None, "a function is watched only outside a main thread"
        process = self._own_process(column)
        func = self._funcs[column]
        assert func is not None
        if not self._thread.is_moved(func):
            self._thread.in_processes.append(func)
            logger.warning(
                "%s %s, so it runs in a process of its own from now on. What it changes in the script's objects stays "
                "in that process.",
                *(self._functions([column]), why),
            )
        process.start()
        self._moved[column] = process
        if self._interrupted.is_set():  # `interrupt` may have seen the processes before this one
            process.close()

    def _score_in_process(self, column: int, group: Group) -> Score | Rejection:
        self._raise_if_interrupted()
        process = self._moved[column]
        self._run([column], process)
        try:
            with self._without_counting():
                process.wait_until_ready()
            if self._timeout_name == "stall_timeout":
                return process(group)
            with self._without_counting():  # the process has the timeout
                return process(group)
        finally:
            self._run([])

    @contextmanager
    def _without_counting(self) -> Iterator[None]:
        began, self._uncounted = self._clock(), True
        try:
            yield
        finally:
            if self._began is not None:
                self._began += self._clock() - began
            self._uncounted = False  # only now: `seconds` is asked from other threads

    def score_all(
        self, groups: Sequence[Group], while_waiting: Callable[[], None] = lambda: None
    ) -> list[Score | Rejection]:
        """Score groups, one after the other.

        Args:
            groups: the groups to score.
            while_waiting: called repeatedly, at least every 20 seconds.

        Raises:
            StallError: scoring one group took longer than `timeout`, or than `stall_timeout` if there is no `timeout`.
            RewardError: as for one group.
        """
        return [self._result(self._submit(group), while_waiting) for group in groups]

    def interrupt(self) -> None:
        """Call no function any more, and end the `async def` functions that are being awaited. The thread that scores
        gets a `RewardError`. A synchronous function cannot be ended. From any thread; call it before `close`."""
        self._interrupted.set()  # before _awaited is read: `_gather` sets _awaited first and reads this second
        awaited = self._awaited
        if awaited is not None:
            awaited.get_loop().call_soon_threadsafe(awaited.cancel)
        for process in list(self._moved.values()):
            process.close()

    def close(self) -> None:
        """Close the functions' processes, and leave a thread alone in which a function hangs. Idempotent."""
        for process in list(self._moved.values()):
            process.close()
        for watched in list(self._watches):  # of functions that hang
            watched.end()
        if self._watchdog is not None:
            self._watchdog.stop()
        self._thread.abandon_if_busy(CLOSE_TIMEOUT)

    def _result(self, future: "Future[Score | Rejection]", while_waiting: Callable[[], None]) -> Score | Rejection:
        try:
            # The seconds of any group: another thread's may be scored first.
            return wait_for_result(future, lambda: self._timeout - self.seconds(), while_waiting)
        except TimeoutError:
            raise StallError(
                f"The rewards of an evaluation have taken longer than {self._timeout_name}={self._timeout:g} s for "
                f"one group. {self.describe()}\n{thread_stacks()}"
            ) from None

    def _call_in_turn(self, funcs: Functions, kwargs: dict[str, Any], loop: EventLoop) -> Iterator[FunctionCall]:
        """The calls of synchronous functions."""
        for column, func in funcs.items():
            self._raise_if_interrupted()
            self._run([column])
            call = FunctionCall(column)
            loop.make_current()
            self._finish(call, partial(func, **self._with_loggers(kwargs, call)), kwargs)
            yield call

    def _await_together(self, funcs: Functions, kwargs: dict[str, Any], loop: EventLoop) -> Iterator[FunctionCall]:
        """The calls of `async def` functions. They run at the same time."""
        if not funcs:
            return
        self._raise_if_interrupted()
        self._run(list(funcs))
        loop.make_current()
        calls = {column: FunctionCall(column) for column in funcs}
        awaitables = [
            partial(_outcome, func, self._with_loggers(kwargs, calls[column]), partial(self._watch, calls[column]))
            for column, func in funcs.items()
        ]
        try:
            outcomes = loop.run(self._gather(awaitables))
        except RewardError:
            raise
        except BaseException as error:  # usually of a task that one of the functions started
            if self._interrupted.is_set():
                raise RewardError(f"{self._functions(funcs)} was being awaited when the run ended.") from None
            raise RewardError(f"{self._functions(funcs)} raised {error!r}.") from error
        for call, outcome in zip(calls.values(), outcomes, strict=True):
            if not call.watched.noticed:
                self._finish(call, outcome, kwargs)
            yield call

    def _finish(self, call: FunctionCall, returns: Callable[[], Any], kwargs: dict[str, Any]) -> None:
        """Set the rewards of a call, unless the function was ended at a call that was noticed."""
        with self._watch(call):
            try:
                # A generator runs only when its values are read.
                name, size = self._names[call.column], len(kwargs["completions"])
                call.values = reward_values(name, self._named_on_error(call.column, returns), size)
            except RewardError:
                if not call.watched.noticed:
                    raise

    @contextmanager
    def _watch(self, call: FunctionCall) -> Iterator[None]:
        changes = call.column not in self._tolerated
        with watch(changes=changes, collectives=self._processes > 1) as call.watched:
            self._watches.add(call.watched)
            try:
                yield
            finally:
                self._watches.discard(call.watched)

    def _with_loggers(self, kwargs: dict[str, Any], call: FunctionCall) -> dict[str, Any]:
        """The arguments of one function, which may change them."""
        own: dict[str, Any] = plain_copy(kwargs)
        return own | {"log_extra": call.log_extra, "log_metric": call.log_metric}

    async def _gather(
        self, awaitables: Sequence[Callable[[], Awaitable[Callable[[], Any]]]]
    ) -> list[Callable[[], Any]]:
        self._awaited = asyncio.current_task()
        try:
            self._raise_if_interrupted()
            return await asyncio.gather(*(awaitable() for awaitable in awaitables))
        finally:
            self._awaited = None

    def _functions(self, columns: Iterable[int]) -> str:
        return f"The reward function {' and '.join(repr(self._names[column]) for column in columns)}"

    def _raise_if_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise RewardError("The run has ended: no reward function is called any more.")

    def _named_on_error(self, column: int, call: Callable[[], Any]) -> Any:
        try:
            returned = call()
        except BaseException as error:  # also an exit or a cancelled task; Ctrl-C is raised in the main thread
            end_forked_child(self._process, error)
            hint = THREAD_HINT if "thread" in str(error) else ""
            raise RewardError(f"{self._functions([column])} raised {error!r}.{hint}") from error
        end_forked_child(self._process, None)
        return returned


def idle_note(stall_timeout: float) -> Note:
    """For the watchdog: no reward function runs in a thread."""
    remedy = "The stacks above show what held it; if it needs that long, raise stall_timeout."
    return Note(stall_timeout + GRACE_SECONDS, "while no reward function was running", remedy)


def running_note(functions: str, timeout: float) -> Note:
    """For the watchdog: the functions run in a thread, for up to `timeout` seconds."""
    return Note(timeout + GRACE_SECONDS, f"while the reward function {functions} was running", FREEZES)


def is_async(func: Callable[..., Any]) -> bool:
    """Whether `func` is an `async def` function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


def wait_for_result(
    future: "Future[Result]", seconds_left: Callable[[], float], while_waiting: Callable[[], None]
) -> Result:
    """The result of `future`.

    Args:
        future: set by another thread.
        seconds_left: how much longer to wait, asked again after each call of `while_waiting`.
        while_waiting: called repeatedly, at least every 20 seconds.

    Raises:
        TimeoutError: no time was left.
    """
    while True:
        timeout = max(0.0, seconds_left())
        try:
            return future.result(min(timeout, WHILE_WAITING_SECONDS))
        except TimeoutError:
            if timeout == 0.0:
                raise
        while_waiting()


async def _outcome(
    func: Callable[..., Awaitable[Any]], kwargs: dict[str, Any], watched: Callable[[], AbstractContextManager[None]]
) -> Callable[[], Any]:
    """A call that returns what `func` returned, or raises what it raised. The error cannot be raised here: an exit
    would end the event loop, and a cancelled task would cancel the other functions."""
    try:
        with watched():
            value = await func(**kwargs)
    except BaseException as error:
        return partial(_raise, error)
    return lambda: value


def _raise(error: BaseException) -> NoReturn:
    raise error
