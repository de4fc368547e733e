"""Reward functions outside of training, where TRL calls them: in `evaluate()` before or after `train()`.

Guarantees: a function is called in the thread, and with the event loop, in which it is called during training; inside
`ends_if_frozen`, a function that holds the interpreter lock ends the process as it does during training.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from trl_a3po.rewards.scorer import FunctionCall, is_async, running_note
from trl_a3po.rewards.thread import EventLoop, RewardThread
from trl_a3po.rewards.watch import limits_time_in_main_thread_only, watch
from trl_a3po.workers.watchdog import Watchdog


def called_in_thread(func: Callable[..., Any], thread: RewardThread) -> Callable[..., Any]:
    """A synchronous function that calls `func` in `thread`. If `func` needs the main thread, it is called where the
    synchronous function is called, which is the main thread."""

    def call(**kwargs: Any) -> Any:
        if thread.is_moved(func) or limits_time_in_main_thread_only(func):
            return _call_here(func, kwargs)
        logged = FunctionCall(column=0)
        own = kwargs | {"log_extra": logged.log_extra, "log_metric": logged.log_metric}
        returned = None
        try:
            returned = thread.submit(partial(_call, func, own, logged)).result()
        except BaseException:
            if not logged.watched.noticed:
                raise
        if logged.watched.noticed:
            return _call_here(func, kwargs)
        for column, values in logged.extra_columns.items():
            kwargs["log_extra"](column, values)
        for name, value in logged.metrics:
            kwargs["log_metric"](name, value)
        return returned

    return call


@contextmanager
def ends_if_frozen(names: Sequence[str], timeout: float) -> Iterator[None]:
    """Inside, the process ends when the functions hold the interpreter lock for longer than `timeout` seconds."""
    watchdog = Watchdog(running_note(", ".join(map(repr, names)), timeout))
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def _call(func: Callable[..., Any], kwargs: dict[str, Any], logged: FunctionCall, loop: EventLoop) -> Any:
    loop.make_current()
    if is_async(func):
        return loop.run(_awaited(func, kwargs, logged))
    with watch() as logged.watched:
        returned = func(**kwargs)
        return None if returned is None else list(returned)  # a generator runs only when its values are read


def _call_here(func: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    return asyncio.run(func(**kwargs)) if is_async(func) else func(**kwargs)


async def _awaited(func: Callable[..., Any], kwargs: dict[str, Any], logged: FunctionCall) -> Any:
    with watch() as logged.watched:  # here, because the event loop does not run in the context of its caller
        return await func(**kwargs)
