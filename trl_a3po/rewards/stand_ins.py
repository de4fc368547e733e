"""The functions that have stand-ins while a reward function is watched, and why.

Guarantees: a stand-in reports its call and then calls the real function, unless the report raises. It costs a look at
one variable in the threads that nobody watches.

Stand-ins are attributes of modules, so code that imported a function by name has the real one. Where a real function
looks something up at each call (`signal.signal`, the functions that seed a generator, all collectives of torch and
accelerate), the stand-in is there, and such code is noticed too.

The states of generators are not compared before and after a call: the trainer draws from the same generators
meanwhile, and a state does not tell whether numbers were drawn from it or it was seeded.
"""

import _signal  # type: ignore[import-not-found]  # no stub
import enum
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Self

ACCURACY_REWARDS = "trl.rewards.accuracy_rewards"
"""TRL's module of rewards that use math-verify. Outside a main thread, they switch its time limits off."""


class Kind(enum.Enum):
    """Why a call is noticed: what completes a sentence that begins with the function's name."""

    MAIN_THREAD = "asks for {}, which only the main thread of a process has"
    PROCESS = "uses {}, which acts on its whole process, and so on training"
    COLLECTIVE = "calls {}, which waits for every process of the run, but only one of them calls reward functions"


Notice = Callable[[Kind, str], None]
"""Reports a call: its kind, and a title for messages."""

_NAMES: tuple[tuple[Kind, ModuleType | str, tuple[str, ...]], ...] = (
    (Kind.MAIN_THREAD, signal, ("alarm", "setitimer", "set_wakeup_fd")),
    (Kind.PROCESS, os, ("chdir", "fchdir", "umask")),
    (Kind.PROCESS, resource, ("setrlimit",)),
    (Kind.PROCESS, random, ("seed", "setstate")),
    (Kind.PROCESS, "numpy.random", ("seed", "set_state")),
    (Kind.PROCESS, "torch", ("manual_seed", "seed", "set_rng_state", "set_default_dtype", "set_default_tensor_type")),
    (Kind.PROCESS, "torch", ("use_deterministic_algorithms", "set_float32_matmul_precision")),
    (Kind.PROCESS, "torch.cuda", ("manual_seed", "manual_seed_all", "set_rng_state")),
    (Kind.COLLECTIVE, "torch.distributed", ("barrier", "monitored_barrier")),
)
"""Functions of a module. A module that is named here, and that nobody has imported, is left out."""


def replacements(notice: Notice) -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, stand-in) of everything that is replaced."""
    for kind, module, names in _NAMES:
        owner = sys.modules.get(module) if isinstance(module, str) else module
        for name in () if owner is None else names:
            title = f"{vars(owner)['__name__']}.{name}"
            yield owner, name, _reporting(notice, kind, title, vars(owner)[name])
    # The Python function `signal.signal` looks `_signal` up at each call.
    asks = _reporting(notice, Kind.MAIN_THREAD, "signal.signal", _signal.signal)
    yield signal, "_signal", SimpleNamespace(**{**vars(_signal), "signal": asks})
    yield threading, "main_thread", _main_thread(notice, threading.main_thread)
    yield sys, "__class__", _sys_class(notice)
    # A version that is passed to `seed` is not noticed.
    yield random.Random.seed, "__defaults__", (None, _Version(notice, vars(random)["_inst"]))
    if (numpy_random := sys.modules.get("numpy.random.mtrand")) is not None:
        yield numpy_random, "_rand", _numpy_generator(notice, vars(numpy_random)["_rand"])
    if (torch_random := sys.modules.get("torch.random")) is not None:
        yield torch_random, "default_generator", _Generator(notice, vars(torch_random)["default_generator"])
    if (collectives := sys.modules.get("torch.distributed.distributed_c10d")) is not None:
        yield collectives, "_rank_not_in_group", _collective(notice, vars(collectives)["_rank_not_in_group"])
    if (operations := sys.modules.get("accelerate.utils.operations")) is not None:
        title = "an operation of accelerate across processes"
        yield operations, "PartialState", _reporting(notice, Kind.COLLECTIVE, title, vars(operations)["PartialState"])


def _reporting(notice: Notice, kind: Kind, title: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        notice(kind, title)
        return real(*args, **kwargs)

    return stand_in


def _main_thread(notice: Notice, real: Callable[[], threading.Thread]) -> Callable[[], threading.Thread]:
    def main_thread() -> threading.Thread:
        if sys._getframe(1).f_globals.get("__name__") == ACCURACY_REWARDS:
            notice(Kind.MAIN_THREAD, "math-verify's time limits")
        return real()

    return main_thread


def _sys_class(notice: Notice) -> type[ModuleType]:
    """A class for `sys` that reports new standard files, such as those of `contextlib.redirect_stdout`: what the
    trainer prints would be captured with what the reward function captures."""

    class Sys(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            if name in ("stdin", "stdout", "stderr"):
                notice(Kind.PROCESS, f"another sys.{name}")
            super().__setattr__(name, value)

    return Sys


class _Version(int):
    """The default version of `random.Random.seed`, which compares it before it seeds."""

    _notice: Notice
    _global: random.Random

    def __new__(cls, notice: Notice, global_generator: random.Random) -> Self:
        version = super().__new__(cls, 2)
        version._notice, version._global = notice, global_generator
        return version

    def __eq__(self, other: object) -> bool:
        if sys._getframe(1).f_locals.get("self") is self._global:
            self._notice(Kind.PROCESS, "random.seed")
        return super().__eq__(other)

    __hash__ = int.__hash__


def _numpy_generator(notice: Notice, real: Any) -> Any:
    """Numpy's global generator as its functions use it. Libraries keep what they find there, so it is of numpy's
    type, and draws the same numbers."""

    class RandomState(type(real)):  # type: ignore[misc]  # numpy is imported only where it is used
        def seed(self, *args: Any, **kwargs: Any) -> None:
            notice(Kind.PROCESS, "numpy.random.seed")
            real.seed(*args, **kwargs)

    return RandomState(real._bit_generator)


class _Generator:
    """Torch's generator for the CPU as its Python functions use it."""

    def __init__(self, notice: Notice, real: Any) -> None:
        self._notice = notice
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state"):
            self._notice(Kind.PROCESS, f"torch.default_generator.{name}")
        return getattr(self._real, name)


def _collective(notice: Notice, real: Callable[..., bool]) -> Callable[..., bool]:
    """For the function that all collectives but barriers call first."""

    def rank_not_in_group(group: Any) -> bool:
        caller = sys._getframe(1).f_code.co_name
        if not caller.startswith(("get_", "is_")):
            notice(Kind.COLLECTIVE, f"torch.distributed.{caller}")
        return real(group)

    return rank_not_in_group
