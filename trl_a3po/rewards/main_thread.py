"""Notices that a reward function asks for what only the main thread of a process has: handlers of signals, and timers
that end in a signal.

Guarantees:
- the request is noticed where it is made, also if the function swallows every exception;
- inside a `watch`, the functions of the module `signal` have stand-ins. When the last watch ends, the module is as it
  was. Other threads get the real functions meanwhile.
"""

import _signal  # type: ignore[import-not-found]  # no stub
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

ACCURACY_REWARDS = "trl.rewards.accuracy_rewards"
"""TRL's module of rewards that use math-verify. Outside a main thread, they switch its time limits off."""

# What is replaced: a module, the attribute, the real function, and the name for messages. The Python function
# `signal.signal` looks `_signal` up at each call, so a stand-in also reaches code that has imported the function.
_REPLACED: tuple[tuple[ModuleType, str, Callable[..., Any], str], ...] = (
    (signal, "alarm", signal.alarm, "signal.alarm"),
    (signal, "setitimer", signal.setitimer, "signal.setitimer"),
    (signal, "set_wakeup_fd", signal.set_wakeup_fd, "signal.set_wakeup_fd"),
)


class NeedsMainThread(BaseException):
    """Ends a function that asks for what only a main thread has. Not an `Exception`, which functions swallow."""


class Watch:
    """What the function under watch has asked for, or an empty text."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.asked_for = ""

    def end(self) -> None:
        """Notice nothing any more. Idempotent; from any thread."""
        with _lock:
            if self in _watches:
                _watches.remove(self)
                if not _watches:
                    _put_back()


_lock = threading.Lock()
_watches: set[Watch] = set()
_watch: ContextVar[Watch | None] = ContextVar("the watch over the reward function that runs", default=None)


@contextmanager
def watch() -> Iterator[Watch]:
    """Inside, `asked_for` is set when this thread, or a task that is started here, asks for what only a main thread
    has. In a main thread, nothing is watched."""
    watched = Watch()
    if threading.current_thread() is threading.main_thread():
        yield watched
        return
    with _lock:
        if not _watches:
            _replace()
        _watches.add(watched)
    token = _watch.set(watched)
    try:
        yield watched
    finally:
        _watch.reset(token)
        watched.end()


def limits_time_in_main_thread_only(func: Callable[..., Any]) -> bool:
    """Whether `func` is one of TRL's rewards that limit their time by signals, but only in a main thread."""
    while isinstance(func, partial):
        func = func.func
    return func.__module__ == ACCURACY_REWARDS


def _replace() -> None:
    signal._signal = SimpleNamespace(  # type: ignore[attr-defined]  # private
        **{**vars(_signal), "signal": _stand_in(_signal.signal, "signal.signal")}
    )
    for module, name, real, title in _REPLACED:
        setattr(module, name, _stand_in(real, title))
    threading.main_thread = _main_thread


def _put_back() -> None:
    signal._signal = _signal  # type: ignore[attr-defined]  # private
    for module, name, real, _ in _REPLACED:
        setattr(module, name, real)
    threading.main_thread = _real_main_thread


def _stand_in(real: Callable[..., Any], title: str) -> Callable[..., Any]:
    def noticed(*args: Any, **kwargs: Any) -> Any:
        _notice(title)
        return real(*args, **kwargs)

    return noticed


_real_main_thread = threading.main_thread


def _main_thread() -> threading.Thread:
    if sys._getframe(1).f_globals.get("__name__") == ACCURACY_REWARDS:
        _notice("math-verify's time limits")
    return _real_main_thread()


def _notice(title: str) -> None:
    watched = _watch.get()
    if watched is not None and watched in _watches and watched.thread == threading.get_ident():
        watched.asked_for = watched.asked_for or title
        raise NeedsMainThread(f"{title} needs the main thread of a process.")
