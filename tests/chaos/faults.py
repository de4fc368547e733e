"""The faults that fall in a chaotic run: where each can fall, and how the process then ends.

Guarantees: a fault is one entry here; `apply` makes it happen in the process of a life, or tells the reward function,
the dataset or a server, through a file of its folder, to misbehave once.
"""

import contextlib
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FROZEN_SECONDS, SUSPENDED_SECONDS = 1.0, 600.0
REWARD_TIMEOUT = 2.0


@dataclass(frozen=True)
class Fault:
    """
    Args:
        apply: what happens, given the `Life`.
        engine, scorer: with which it can fall, `None` with any.
        ends: how the process ends: a pattern of its error, an exit code, or `None` if it goes on.
        is_quick: it costs no time.
    """

    apply: Callable[[Any], None]
    engine: str | None = None
    scorer: str | None = None
    ends: str | int | None = None
    is_quick: bool = False


# --- signals --------------------------------------------------------------------------------------------------------


def _to_engine(number: int):
    return lambda life: _send(life.engine_pid, number)


def _to_rewards(number: int):
    return lambda life: [_send(pid, number) for pid in life.reward_pids[:1]]


def _to_server(number: int):
    return lambda life: _send(life.server_pid, number)


def _to_self(*numbers: int):
    return lambda life: [os.kill(os.getpid(), number) for number in numbers]


def _send(pid: int | None, number: int) -> None:
    """Nothing if the process is not there, because an earlier fault has just ended it."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _frozen(pids: Callable[[Any], list[int | None]]):
    def freeze(life):
        stopped = pids(life)
        for pid in stopped:
            _send(pid, signal.SIGSTOP)
        threading.Timer(FROZEN_SECONDS, lambda: [_send(pid, signal.SIGCONT) for pid in stopped]).start()

    return freeze


def _suspended(life) -> None:
    """Every process of the run stops at the same moment, as on a suspended machine."""
    pids = " ".join(str(pid) for pid in (life.engine_pid, *life.reward_pids, os.getpid()) if pid is not None)
    script = f"kill -STOP {pids}; sleep {FROZEN_SECONDS}; kill -CONT {pids}"
    subprocess.Popen(["sh", "-c", script], start_new_session=True, stderr=subprocess.DEVNULL).wait()


def _out_of_memory(pid: Callable[[Any], int | None]):
    """No further allocation of the process succeeds."""

    def limit(life):
        if (found := pid(life)) is not None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(found, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))

    return limit


# --- clocks ---------------------------------------------------------------------------------------------------------


def _jump(seconds: float):
    def jump(life):
        life.clock_shift += seconds

    return jump


def _minutes_pass(life) -> None:
    life.suspended_seconds += SUSPENDED_SECONDS


# --- files ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk():
    """Inside, no file of this process can grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def read_only():
    """Inside, no folder can be made."""
    real = os.mkdir

    def refused(path, *args, **kwargs):
        raise OSError(30, "Read-only file system", str(path))

    os.mkdir = refused
    try:
        yield
    finally:
        os.mkdir = real


def _at_save(context):
    def arm(life):
        life.around_save = context
        life.trainer.args.save_steps = 1

    return arm


def _at_publish(life) -> None:
    engine = life.trainer._session.engine
    publish = engine.publish

    def failing(update):
        with full_disk():
            publish(update)

    engine.publish = failing


def _timeline(life) -> None:
    life.trainer._session.timeline._path = Path("/dev/full")


def _shared_memory_full(life) -> None:
    with contextlib.suppress(OSError), Path("/dev/shm/filler").open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()


# --- numbers --------------------------------------------------------------------------------------------------------


def _nan_gradient(life) -> None:
    def poison(gradient):
        handle.remove()
        return torch.full_like(gradient, float("nan"))

    parameter = next(parameter for parameter in life.trainer.model.parameters() if parameter.requires_grad)
    handle = parameter.register_hook(poison)


def _nan_loss(life) -> None:
    life.nan_loss = True


# --- what the reward function, the dataset and the servers are asked for ---------------------------------------------


def _ask(what: str, name: str):
    return lambda life: (life.folder / f"{what}.fault").write_text(name)


def _ask_server(name: str):
    def ask(life):
        _ask("server", name)(life)
        _send(life.server_pid, signal.SIGUSR1)

    return ask


def _own(name: str):
    return _ask("reward", name)


GOES_ON = {
    "engine worker killed": Fault(_to_engine(signal.SIGKILL), "worker"),
    "engine worker frozen": Fault(_frozen(lambda life: [life.engine_pid]), "worker"),
    "engine worker out of memory": Fault(_out_of_memory(lambda life: life.engine_pid), "worker"),
    "engine worker answers garbage": Fault(_to_engine(signal.SIGUSR1), "worker"),
    "engine worker leaves a child with its socket": Fault(_to_engine(signal.SIGUSR2), "worker"),
    "server killed": Fault(_to_server(signal.SIGKILL), "servers"),
    "server frozen": Fault(_frozen(lambda life: [life.server_pid]), "servers"),
    "server out of memory": Fault(_ask_server("500"), "servers", is_quick=True),
    "server answers garbage": Fault(_ask_server("garbage"), "servers", is_quick=True),
    "server answers too few log-probs": Fault(_ask_server("misaligned"), "servers", is_quick=True),
    "server answers NaN": Fault(_ask_server("nan"), "servers", is_quick=True),
    "server breaks the connection": Fault(_ask_server("reset"), "servers", is_quick=True),
    "reward worker killed": Fault(_own("kill"), scorer="process"),
    "idle reward worker killed": Fault(_to_rewards(signal.SIGKILL), scorer="process"),
    "reward worker frozen": Fault(_frozen(lambda life: life.reward_pids), scorer="process"),
    "reward worker answers garbage": Fault(_own("garbage"), scorer="process"),
    "reward worker leaves a child with its socket": Fault(_own("child"), scorer="process"),
    "reward hangs in a process": Fault(_own("hang"), scorer="process"),
    "reward holds the lock of a process": Fault(_own("lock"), scorer="process"),
    "timeline on a full disk": Fault(_timeline),
    "shared memory full": Fault(_shared_memory_full),
    "clock a day ahead": Fault(_jump(86_400.0), is_quick=True),
    "clock a day back": Fault(_jump(-86_400.0), is_quick=True),
    "clock seconds ahead": Fault(_jump(3.0), is_quick=True),
    "clock seconds back": Fault(_jump(-3.0), is_quick=True),
    "machine suspended": Fault(_suspended),
    "minutes pass while suspended": Fault(_minutes_pass, is_quick=True),
}
ENDS = {
    "reward raises": Fault(_own("raise"), ends="KeyError"),
    "reward out of memory": Fault(_own("memory"), scorer="process", ends="MemoryError"),
    "reward is NaN": Fault(_own("nan"), ends="returned nan"),
    "reward is infinite": Fault(_own("inf"), ends="returned inf"),
    "reward of the wrong length": Fault(_own("short"), ends="returned 1 rewards"),
    "reward hangs in the thread": Fault(_own("hang"), scorer="thread", ends="reward_timeout=2"),
    "reward holds the lock": Fault(_own("lock"), scorer="thread", ends=-signal.SIGKILL),
    "checkpoint on a full disk": Fault(_at_save(full_disk), ends="could not be written"),
    "checkpoint on a read-only disk": Fault(_at_save(read_only), ends="could not be written"),
    "weights on a full disk": Fault(_at_publish, "servers", ends="File too large"),
    "NaN gradient": Fault(_nan_gradient, ends="finite|NaN"),
    "NaN loss": Fault(_nan_loss, ends="finite|NaN"),
    "dataset raises": Fault(_ask("dataset", "raise"), ends="Input/output error"),
    "SIGTERM": Fault(_to_self(signal.SIGTERM), ends=75),
    "SIGTERM twice": Fault(_to_self(signal.SIGTERM, signal.SIGTERM), ends=-signal.SIGTERM),
    "SIGINT": Fault(_to_self(signal.SIGINT), ends="KeyboardInterrupt"),
    "SIGINT twice": Fault(_to_self(signal.SIGINT, signal.SIGINT), ends="KeyboardInterrupt"),
    "SIGKILL": Fault(_to_self(signal.SIGKILL), ends=-signal.SIGKILL),
}
FAULTS = GOES_ON | ENDS
