"""Scoring a finished group with the user's reward functions, as GRPOTrainer would call them.

Guarantees: each function is called once per group, with the keyword arguments GRPOTrainer documents; synchronous and
`async def` functions keep their state between calls (same process, same event loop); what they return is one finite
number or `None` per completion, or a `RewardError` names the function and what it did. A function that hangs holds
the thread that called it, and nobody else for longer than `score_all`'s limit; `interrupt` ends it if it is awaited,
and none is called after it.
"""

import asyncio
import inspect
import math
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

from trl_a3po.errors import RewardError, StallError
from trl_a3po.protocol.records import Group, Score
from trl_a3po.rewards.values import reward_values
from trl_a3po.workers.thread_stacks import thread_stacks

CLOSE_SECONDS = 1.0  # for a group that is being scored
WAITING_SECONDS = 10.0
RESERVED = ("prompt", "completion", "completion_ids")


class RewardScorer:
    """`scorer(group) -> Score`, one group at a time, whichever thread calls.

    Args:
        funcs: reward functions, in the order of the rewards' columns. `None` marks a column that is computed
            elsewhere (a reward model): it stays NaN here.
        names: a name per function, for messages.
        decode: group -> its completions, as text or as messages.
        state: group -> the snapshot of the trainer's state that its reward functions get.
        on_column: called with a column's number and its G rewards as soon as they are known; the `async def`
            functions' come together, after the others.
        timeout: seconds the functions may take for one group of `score_all`; `None` is `stall_timeout`.
        stall_timeout: the limit where there is no `timeout`.
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
        self._limit_name = "stall_timeout" if timeout is None else "reward_timeout"
        self._limit = stall_timeout if timeout is None else timeout
        self._runner: asyncio.Runner | None = None
        self._awaited: asyncio.Task | None = None  # the `async def` functions at work
        self._interrupted = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._began: float | None = None  # with the group being scored
        self._running: list[int] = []  # the columns being computed

    def __call__(self, group: Group) -> Score:
        with self._one_at_a_time:
            self._began = time.monotonic()
            try:
                return self._score(group)
            finally:
                self._began = None
                self._running = []

    def describe(self) -> str:
        """Which function is at work and what would help if it hangs; empty if none is. From any thread."""
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
            "which it is killed and replaced, or, if it needs that long, raise stall_timeout and reward_timeout."
        )

    def _score(self, group: Group) -> Score:
        self._raise_if_interrupted()
        started = time.perf_counter()
        size = len(group.rollouts)
        score = Score(rewards=[[math.nan] * len(self._funcs) for _ in range(size)])
        extra_columns: dict[str, list[Any]] = defaultdict(list)
        kwargs = {name: [value] * size for name, value in group.prompt.example.items() if name not in RESERVED}
        kwargs |= {
            "prompts": [group.prompt.example["prompt"]] * size,
            "completions": self._decode(group),
            "completion_ids": [list(rollout.token_ids) for rollout in group.rollouts],
            "trainer_state": self._state(group),
            "log_extra": lambda column, values: extra_columns[column].extend(values),
            "log_metric": lambda name, value: score.metrics.append((name, float(value))),
        }
        for column, returned in self._call(kwargs):
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
        """Score groups, one after the other, in a thread of their own.

        Args:
            while_waiting: called every now and then, at least every 20 seconds.

        Raises:
            StallError: the functions were at one group for longer than `timeout`, or else `stall_timeout`.
            RewardError: as for one group.
        """
        futures: list[Future[Score]] = [Future() for _ in groups]
        # Daemonic: a hung function shall not keep the process from ending.
        thread = threading.Thread(
            target=self._score_into, args=(groups, futures), name="a3po evaluation rewards", daemon=True
        )
        thread.start()
        return [self._result(future, while_waiting) for future in futures]

    def interrupt(self) -> None:
        """Call no function any more, and end the `async def` ones that are being awaited: whoever is scoring gets a
        `RewardError`. One that is not awaited cannot be ended. From any thread; before `close`."""
        self._interrupted.set()  # before the look at _awaited: `_gather` sets that first and looks here second
        awaited = self._awaited
        if awaited is not None:
            awaited.get_loop().call_soon_threadsafe(awaited.cancel)

    def close(self) -> None:
        """Close the event loop of the `async def` functions, if one was started and none is hanging. Idempotent."""
        if not self._one_at_a_time.acquire(timeout=CLOSE_SECONDS):
            return  # the loop is running, in a thread that was abandoned
        try:
            runner, self._runner = self._runner, None
            if runner is not None:
                # In a thread: a notebook's main thread runs an event loop of its own, which allows no other beside it.
                closer = threading.Thread(target=runner.close, name="a3po closing rewards", daemon=True)
                closer.start()
                closer.join(CLOSE_SECONDS)
        finally:
            self._one_at_a_time.release()

    def _score_into(self, groups: Sequence[Group], futures: "list[Future[Score]]") -> None:
        for group, future in zip(groups, futures, strict=True):
            try:
                future.set_result(self(group))
            except BaseException as error:  # a function's SystemExit would otherwise end the thread in silence
                future.set_exception(error)
                return

    def _result(self, future: "Future[Score]", while_waiting: Callable[[], None]) -> Score:
        while True:
            # Another thread's group may be in the functions' hands first.
            began = self._began
            running = 0.0 if began is None else time.monotonic() - began
            try:
                return future.result(min(max(0.0, self._limit - running), WAITING_SECONDS))
            except TimeoutError:
                if running >= self._limit:
                    raise StallError(
                        f"An evaluation's rewards have taken longer than {self._limit_name}={self._limit:g} s for "
                        f"one group. {self.describe()}\n{thread_stacks()}"
                    ) from None
            while_waiting()

    def _call(self, kwargs: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """What each function returned, by column; the `async def` ones run last and at the same time."""
        pending = {i: func for i, func in enumerate(self._funcs) if func is not None and is_async(func)}
        for i, func in enumerate(self._funcs):
            if func is not None and i not in pending:
                self._raise_if_interrupted()
                self._running = [i]
                yield i, self._guarded(i, lambda func=func: func(**kwargs))
        if pending:
            self._raise_if_interrupted()
            self._running = list(pending)
            if self._runner is None:
                self._runner = asyncio.Runner()
            try:
                outcomes = self._runner.run(self._gather(list(pending.values()), kwargs))
            except RewardError:
                raise
            except BaseException as error:  # of a task that a function began beside itself, above all
                if self._interrupted.is_set():
                    raise RewardError(f"{self._functions(pending)} was being awaited when the run ended.") from None
                raise RewardError(f"{self._functions(pending)} raised {error!r}.") from error
            for i, outcome in zip(pending, outcomes, strict=True):
                yield i, self._guarded(i, outcome)

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

    def _guarded(self, column: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # an exit or a cancelled task, too: Ctrl-C is raised elsewhere
            raise RewardError(f"{self._functions([column])} raised {error!r}.") from error


def is_async(func: Callable[..., Any]) -> bool:
    """Whether calling `func` gives something to await (`async def`, or an object whose `__call__` is one)."""
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


async def _outcome(func: Callable[..., Awaitable[Any]], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """What gives what `func` returned, or raises what it raised. It cannot be raised here: an exit would end the loop,
    and a cancelled task cancel the functions beside it."""
    try:
        value = await func(**kwargs)
    except BaseException as error:
        return partial(_raise, error)
    return lambda: value


def _raise(error: BaseException) -> NoReturn:
    raise error
