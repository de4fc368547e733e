"""What tests ask about processes."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT = 150.0


def until(condition: Callable[[], object], timeout: float = TIMEOUT) -> None:
    """Wait until `condition()` is true; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether the process has ended. A zombie that waits for another process's `wait` has."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def is_reaped(pid: int) -> bool:
    """Whether not even a zombie is left of the process."""
    return not os.path.exists(f"/proc/{pid}")


def children() -> list[int]:
    """Processes that this process has started and not reaped."""
    pids: list[str] = []
    for started in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            pids += started.read_text().split()
    return [int(pid) for pid in pids]


def children_that_run(module: str) -> dict[int, str]:
    """Id and command of each child of this process whose command names `module`."""
    found = {}
    for pid in children():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return {pid: command for pid, command in found.items() if module in command}


def own_shared_memory(size: str) -> list[str]:
    """What a command begins with to have a `/dev/shm` of its own, of `size`; nothing where that is not allowed."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" "$@"'
    inside = ["unshare", "-rm", "sh", "-c", mount]
    try:
        allowed = subprocess.run([*inside, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    return inside if allowed else []
