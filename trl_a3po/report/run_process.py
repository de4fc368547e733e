"""The process that trains a run, as its timeline names it, and whether it is still there.

Guarantees: a process is said to be gone only on the machine that it ran on, where its id is known (Linux, the same
boot, the same containers of process ids); another process that was given its id later is not taken for it.
"""

import os
import sys
from pathlib import Path
from typing import Any

ENDED = "ZX"  # states of a process that has ended and whose parent has not asked for its exit code


def this_process() -> dict[str, Any] | None:
    """What the line `start` of a timeline says of this process; `None` on systems whose `/proc` does not tell."""
    machine = _machine()
    try:
        return None if machine is None else {"pid": os.getpid(), "started": _state(os.getpid())[1], "machine": machine}
    except OSError:
        return None


def is_gone(process: dict[str, Any] | None) -> bool:
    """Whether the process that `this_process` described has ended. False where this cannot be known."""
    return _is_there(process) is False


def is_running(process: dict[str, Any] | None) -> bool:
    """Whether the process that `this_process` described is there. False where this cannot be known."""
    return _is_there(process) is True


def _is_there(process: dict[str, Any] | None) -> bool | None:
    """`None` where this cannot be known."""
    if process is None or process.get("machine") != _machine():
        return None
    try:
        os.kill(process["pid"], 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and another user's
        pass
    try:
        state, started = _state(process["pid"])
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # another user's, hidden, or ending right now
        return None
    return state not in ENDED and started == process["started"]


def how_it_was_left(steps: int) -> str:
    """What to know of a run whose process is gone, and whose timeline has no end, after so many optimizer steps."""
    when = f"after optimizer step {steps}" if steps else "before its first optimizer step"
    then = (
        "resume_from_checkpoint=True goes on from its newest checkpoint, if it has one"
        if steps
        else "What it printed may say why"
    )
    return f"the process was killed {when}: it is not there any more, and its timeline has no end. {then}."


def _machine() -> str | None:
    """Where a process id and the start of a process mean the same: this boot of the kernel, and the namespaces of
    process ids and of the clock."""
    if sys.platform != "linux":
        return None
    try:
        links = ["/proc/self/ns/pid", "/proc/self/ns/time"]  # an old kernel has one clock for all
        namespaces = [os.readlink(link) for link in links if os.path.lexists(link)]
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *namespaces])
    except OSError:
        return None


def _state(pid: int) -> tuple[str, int]:
    """The state of a process, and when it started, in ticks of the clock since the boot."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
