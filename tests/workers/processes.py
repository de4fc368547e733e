"""What tests ask about processes."""

import os
import time
from collections.abc import Callable

TIMEOUT = 60.0


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
