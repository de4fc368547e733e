"""Time as this process has lived it: a process that is stopped, or a machine that is suspended, lets no time pass.

Guarantees: an interval between two looks at the clock counts at most as long as it can be while the process runs. A
limit that is measured with this clock is so not reached by being stopped (SIGSTOP, a suspended laptop, a frozen
container), whatever the monotonic clock of the system does meanwhile.
"""

import threading
import time
from collections.abc import Callable

TICK = 0.5
"""Seconds between two looks of a loop that waits."""


class RunningClock:
    """`clock()` is how many seconds this process has run, as far as it looked at the clock. From any thread.

    Args:
        longest: the longest interval between two calls that counts in full.
        clock: a monotonic clock.
    """

    def __init__(self, longest: float = 4 * TICK, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest = longest
        self._clock = clock
        self._lock = threading.Lock()
        self._asked = clock()
        self._seconds = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            self._seconds += min(now - self._asked, self._longest)
            self._asked = now
            return self._seconds


def wait_running(
    condition: threading.Condition,
    done: Callable[[], object],
    timeout: float,
    is_stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """As `condition.wait_for(done, timeout)`, where time counts only while this process runs and the process that is
    waited for is not stopped. The caller holds the lock."""
    clock = RunningClock()
    waited, looked = 0.0, clock()
    while not done():
        if waited >= timeout:
            return False
        condition.wait(min(TICK, timeout - waited))
        now = clock()
        if not is_stopped():
            waited += now - looked
        looked = now
    return True
