"""Scoring a finished group with the user's reward functions, as GRPOTrainer would call them.

Guarantees: each function is called once per group, with the keyword arguments GRPOTrainer documents; synchronous and
`async def` functions keep their state between calls (same process, same event loop); what they return is one finite
number or `None` per completion, or a `RewardError` names the function and what it did.
"""

import asyncio
import inspect
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trl_a3po.errors import RewardError
from trl_a3po.rollout.records import Group, Score


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
    """

    def __init__(
        self,
        funcs: Sequence[Callable[..., Any] | None],
        names: Sequence[str],
        decode: Callable[[Group], list[Any]],
        state: Callable[[Group], Any],
        on_column: Callable[[int, list[float]], None] | None = None,
    ):
        self._funcs = list(funcs)
        self._names = list(names)
        self._decode = decode
        self._state = state
        self._on_column = on_column
        self._runner: asyncio.Runner | None = None
        self._one_at_a_time = threading.Lock()

    def __call__(self, group: Group) -> Score:
        with self._one_at_a_time:
            return self._score(group)

    def _score(self, group: Group) -> Score:
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
            values = self._checked(column, returned, size)
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

    def score_all(self, groups: Sequence[Group]) -> list[Score]:
        """Score groups, one after the other."""
        return [self(group) for group in groups]

    def close(self) -> None:
        """Close the event loop of the `async def` functions, if one was started. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _call(self, kwargs: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """What each function returned, by column; the `async def` ones run last and at the same time."""
        pending = {i: func for i, func in enumerate(self._funcs) if func is not None and is_async(func)}
        for i, func in enumerate(self._funcs):
            if func is not None and i not in pending:
                yield i, self._guarded(i, lambda func=func: func(**kwargs))
        if pending:

            async def gather():
                return await asyncio.gather(*(func(**kwargs) for func in pending.values()), return_exceptions=True)

            if self._runner is None:
                self._runner = asyncio.Runner()
            for i, result in zip(pending, self._runner.run(gather()), strict=True):
                yield i, self._guarded(i, lambda result=result: _value_or_raise(result))

    def _guarded(self, column: int, call: Callable[[], Any]) -> Any:
        try:
            result = call()
        except Exception as error:
            raise RewardError(f"The reward function '{self._names[column]}' raised {error!r}.") from error
        if result is None:
            raise RewardError(
                f"The reward function '{self._names[column]}' returned None instead of a list: return one number, or "
                "None, per completion."
            )
        return result

    def _checked(self, column: int, returned: Any, size: int) -> list[float]:
        name = self._names[column]
        try:
            values = list(returned)
        except TypeError:
            raise RewardError(
                f"The reward function '{name}' returned a {type(returned).__name__}: return a list with one number "
                "per completion."
            ) from None
        if len(values) != size:
            raise RewardError(
                f"The reward function '{name}' returned {len(values)} rewards for a group of {size} completions: "
                "return exactly one per completion."
            )
        return [self._number(name, i, value) for i, value in enumerate(values)]

    @staticmethod
    def _number(name: str, i: int, value: Any) -> float:
        if value is None:
            return math.nan
        if isinstance(value, str):
            raise RewardError(
                f"The reward function '{name}' returned the text {value!r} for completion {i}: return a number."
            )
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise RewardError(
                f"The reward function '{name}' returned a {type(value).__name__} for completion {i}: return a number, "
                "or None where the function does not apply."
            ) from None
        if not math.isfinite(number):
            raise RewardError(
                f"The reward function '{name}' returned {number} for completion {i}: return a finite number, or None "
                "where the function does not apply."
            )
        return number


RESERVED = ("prompt", "completion", "completion_ids")


def is_async(func: Callable[..., Any]) -> bool:
    """Whether calling `func` gives something to await (`async def`, or an object whose `__call__` is one)."""
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


def _value_or_raise(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result
