"""Scoring a finished group with the user's reward functions, called as GRPOTrainer calls them.

Guarantees:
- each function is called once per group, with the keyword arguments that GRPOTrainer documents;
- synchronous and `async def` functions keep their state between calls (same process, same event loop);
- a function returns one finite number or `None` per completion, or a `RewardError` names the function and says what it
  did;
- a function that hangs blocks the thread that called it, and no other thread for longer than the timeout of
  `score_all`;
- `interrupt` ends a function that is being awaited, and no function is called after it.
"""

import asyncio
import inspect
import itertools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn, TypeVar

from trl_a3po.errors import RewardError, StallError
from trl_a3po.protocol.records import Group, Score
from trl_a3po.rewards.values import reward_values
from trl_a3po.workers.thread_stacks import thread_stacks

CLOSE_TIMEOUT = 1.0  # seconds for a group that is being scored
WHILE_WAITING_SECONDS = 10.0  # between two calls of `while_waiting`
RESERVED = ("prompt", "completion", "completion_ids")

Result = TypeVar("Result")


class RewardScorer:
    """`scorer(group) -> Score`, one group at a time, from any thread.

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
    ):
        self._funcs = list(funcs)
        self._names = list(names)
        self._decode = decode
        self._state = state
        self._on_column = on_column
        self._timeout_name = "stall_timeout" if timeout is None else "reward_timeout"
        self._timeout = stall_timeout if timeout is None else timeout
        self._runner: asyncio.Runner | None = None
        self._awaited: asyncio.Task[Any] | None = None  # runs the `async def` functions
        self._interrupted = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._began: float | None = None  # when scoring the present group began
        self._running: list[int] = []  # the columns that are being computed

    def __call__(self, group: Group) -> Score:
        with self._one_at_a_time:
            self._began = time.monotonic()
            try:
                return self._score(group)
            finally:
                self._began = None
                self._running = []

    def describe(self) -> str:
        """Which function is running and what would help if it hangs; empty if none is running. From any thread."""
        began, running = self._began, self._running
        if began is None or not running:
            return ""
        seconds = f"{time.monotonic() - began:.1f} s"
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

    def _score(self, group: Group) -> Score:
        self._raise_if_interrupted()
        started = time.perf_counter()
        size = len(group.rollouts)
        score = Score(rewards=[[math.nan] * len(self._funcs) for _ in range(size)])
        extra_columns: dict[str, list[Any]] = defaultdict(list)
        example = group.prompt.example
        kwargs: dict[str, Any] = {name: [value] * size for name, value in example.items() if name not in RESERVED}
        kwargs |= {
            "prompts": [example["prompt"]] * size,
            "completions": self._decode(group),
            "completion_ids": [list(rollout.token_ids) for rollout in group.rollouts],
            "trainer_state": self._state(group),
            "log_extra": lambda column, values: extra_columns[column].extend(values),
            "log_metric": lambda name, value: score.metrics.append((name, float(value))),
        }
        for column, returned in itertools.chain(self._call_in_turn(kwargs), self._await_together(kwargs)):
            values = reward_values(self._names[column], returned, size)
            for row, value in zip(score.rewards, values, strict=True):
                row[column] = value
            if self._on_column is not None:
                self._on_column(column, values)
        for name, values in extra_columns.items():
            if len(values) != size:
                raise RewardError(
                    f"log_extra({name!r}, ...) recorded {len(values)} values for a group of {size} completions: "
                    "record one value per completion."
                )
        score.extra_columns = dict(extra_columns)
        score.seconds = time.perf_counter() - started
        return score

    def score_all(self, groups: Sequence[Group], while_waiting: Callable[[], None] = lambda: None) -> list[Score]:
        """Score groups, one after the other, in another thread.

        Args:
            groups: the groups to score.
            while_waiting: called repeatedly, at least every 20 seconds.

        Raises:
            StallError: scoring one group took longer than `timeout`, or than `stall_timeout` if there is no `timeout`.
            RewardError: as for one group.
        """
        futures: list[Future[Score]] = [Future() for _ in groups]
        # A daemon thread: a function that hangs must not keep the process from ending.
        thread = threading.Thread(
            target=self._score_into, args=(groups, futures), name="a3po evaluation rewards", daemon=True
        )
        thread.start()
        return [self._result(future, while_waiting) for future in futures]

    def interrupt(self) -> None:
        """Call no function any more, and end the `async def` functions that are being awaited. The thread that scores
        gets a `RewardError`. A synchronous function cannot be ended. From any thread; call it before `close`."""
        self._interrupted.set()  # before _awaited is read: `_gather` sets _awaited first and reads this second
        awaited = self._awaited
        if awaited is not None:
            awaited.get_loop().call_soon_threadsafe(awaited.cancel)

    def close(self) -> None:
        """Close the event loop of the `async def` functions, if it was started and no function hangs. Idempotent."""
        if not self._one_at_a_time.acquire(timeout=CLOSE_TIMEOUT):
            return  # the loop is running, in a thread that was abandoned
        try:
            runner, self._runner = self._runner, None
            if runner is not None:
                # In a thread: the main thread of a notebook already runs an event loop, and may not run another.
                closer = threading.Thread(target=runner.close, name="a3po closing rewards", daemon=True)
                closer.start()
                closer.join(CLOSE_TIMEOUT)
        finally:
            self._one_at_a_time.release()

    def _score_into(self, groups: Sequence[Group], futures: "list[Future[Score]]") -> None:
        for group, future in zip(groups, futures, strict=True):
            try:
                future.set_result(self(group))
            except BaseException as error:  # otherwise a function's SystemExit would end the thread silently
                future.set_exception(error)
                return

    def _result(self, future: "Future[Score]", while_waiting: Callable[[], None]) -> Score:
        def seconds_left() -> float:
            began = self._began  # of any group: another thread's may be scored first
            return self._timeout if began is None else self._timeout - (time.monotonic() - began)

        try:
            return wait_for_result(future, seconds_left, while_waiting)
        except TimeoutError:
            raise StallError(
                f"The rewards of an evaluation have taken longer than {self._timeout_name}={self._timeout:g} s for "
                f"one group. {self.describe()}\n{thread_stacks()}"
            ) from None

    def _call_in_turn(self, kwargs: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """The column of each synchronous function, and what the function returned."""
        for column, func in enumerate(self._funcs):
            if func is not None and not is_async(func):
                self._raise_if_interrupted()
                self._running = [column]
                yield column, self._named_on_error(column, partial(func, **kwargs))

    def _await_together(self, kwargs: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """The column of each `async def` function, and what the function returned. They run at the same time."""
        funcs = {column: func for column, func in enumerate(self._funcs) if func is not None and is_async(func)}
        if not funcs:
            return
        self._raise_if_interrupted()
        self._running = list(funcs)
        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            outcomes = self._runner.run(self._gather(list(funcs.values()), kwargs))
        except RewardError:
            raise
        except BaseException as error:  # usually of a task that one of the functions started
            if self._interrupted.is_set():
                raise RewardError(f"{self._functions(funcs)} was being awaited when the run ended.") from None
            raise RewardError(f"{self._functions(funcs)} raised {error!r}.") from error
        for column, outcome in zip(funcs, outcomes, strict=True):
            yield column, self._named_on_error(column, outcome)

    async def _gather(
        self, funcs: list[Callable[..., Awaitable[Any]]], kwargs: dict[str, Any]
    ) -> list[Callable[[], Any]]:
        self._awaited = asyncio.current_task()
        try:
            self._raise_if_interrupted()
            return await asyncio.gather(*(_outcome(func, kwargs) for func in funcs))
        finally:
            self._awaited = None

    def _functions(self, columns: Iterable[int]) -> str:
        return f"The reward function {' and '.join(repr(self._names[column]) for column in columns)}"

    def _raise_if_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise RewardError("The run has ended: no reward function is called any more.")

    def _named_on_error(self, column: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # also an exit or a cancelled task; Ctrl-C is raised in the main thread
            raise RewardError(f"{self._functions([column])} raised {error!r}.") from error


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


async def _outcome(func: Callable[..., Awaitable[Any]], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """A call that returns what `func` returned, or raises what it raised. The error cannot be raised here: an exit
    would end the event loop, and a cancelled task would cancel the other functions."""
    try:
        value = await func(**kwargs)
    except BaseException as error:
        return partial(_raise, error)
    return lambda: value


def _raise(error: BaseException) -> NoReturn:
    raise error
