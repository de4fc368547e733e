"""Notices what a reward function must not do in a thread beside training: ask for what only the main thread of a
process has, change what belongs to the whole process, or wait for the other processes of the run.

Guarantees:
- the call is noticed where it is made, before it has an effect, also if the function swallows every exception;
- inside a `watch`, some functions of other modules have stand-ins (`stand_ins`). When the last watch ends, the modules
  are as they were. Other threads, and processes that are forked inside a watch, get the real functions meanwhile.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from trl_a3po.rewards.stand_ins import ACCURACY_REWARDS, Kind, replacements


class Noticed(BaseException):
    """Ends a function at the call that was noticed. Not an `Exception`, which functions swallow."""


class Watch:
    """What was noticed of one call of a function.

    Args:
        changes: whether to notice changes of what belongs to the whole process.
        collectives: whether to notice operations across processes.
    """

    def __init__(self, *, changes: bool = True, collectives: bool = False) -> None:
        self.thread = threading.get_ident()
        self.process = os.getpid()
        in_main_thread = threading.current_thread() is threading.main_thread()
        self.kinds = {
            kind
            for kind, noticed in (
                (Kind.MAIN_THREAD, not in_main_thread),
                (Kind.PROCESS, changes and not in_main_thread),
                (Kind.COLLECTIVE, collectives),
            )
            if noticed
        }
        self.noticed = ""
        """What the function was ended for; completes a sentence that begins with its name. Or empty."""
        self.noticed_kind: Kind | None = None

    def end(self) -> None:
        """Notice nothing any more. Idempotent; from any thread."""
        with _lock:
            if self in _watches:
                _watches.remove(self)
                if not _watches:
                    _put_back()

    def notices(self, kind: Kind) -> bool:
        """Whether calls of this kind, made here and now, are noticed."""
        here = self in _watches and self.thread == threading.get_ident() and self.process == os.getpid()
        return here and kind in self.kinds


_lock = threading.Lock()
_watches: set[Watch] = set()
_replaced: list[tuple[Any, str, Any]] = []
_watch: ContextVar[Watch | None] = ContextVar("the watch over the reward function that runs", default=None)


@contextmanager
def watch(*, changes: bool = True, collectives: bool = False) -> Iterator[Watch]:
    """Inside, the watch has what this thread, or a task that is started here, does. In a main thread, only operations
    across processes are watched."""
    watched = Watch(changes=changes, collectives=collectives)
    if not watched.kinds:
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
    for owner, name, stand_in in replacements(_notice):
        _replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, stand_in)


def _put_back() -> None:
    while _replaced:
        setattr(*_replaced.pop())


def _notice(kind: Kind, title: str) -> None:
    watched = _watch.get()
    if watched is None or not watched.notices(kind):
        return
    if not watched.noticed:
        watched.noticed, watched.noticed_kind = kind.value.format(title), kind
    raise Noticed(watched.noticed)
