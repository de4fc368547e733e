"""End this process when another process of the run has failed and this one would wait for it indefinitely.

A process that raises, hangs or is killed leaves the others inside a collective, where no exception reaches them. So
each process runs a thread that watches the key-value store through which the processes found each other, on whichever
machine it is: every process writes a heartbeat there, and a process that raises writes its error.

Guarantees: within `EXIT_TIMEOUT` after another process has failed, or `HEARTBEAT_TIMEOUT + EXIT_TIMEOUT` after its
last heartbeat, this process has raised an error of its own, or it reports the failure on standard error, runs its
cleanup and exits with status 1. Where several processes fail, the first error is the one that is reported. A process
that raises waits up to `REPORT_TIMEOUT` until the others have read its error, because the store may end with this
process. The watch uses no collective, and a run of one process has no watch. Where all processes are stopped and
continued together, the time in between does not count.
"""

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from trl_a3po.distributed.team import Team
from trl_a3po.workers.running_clock import RunningClock

# In seconds.
POLL_INTERVAL = 1.0
HEARTBEAT_TIMEOUT = 90.0
EXIT_TIMEOUT = 10.0
REPORT_TIMEOUT = 5.0
LONGEST_LOOK = 10.0  # between two looks at the heartbeats, with a store that answers slowly

STORE_IS_GONE = "the process that holds the key-value store of the run is gone"

_runs = itertools.count()


class RankWatch:
    """A context around what all processes do together.

    Args:
        team: the processes.
        cleanup: ends what would outlive this process; called before the process exits.
    """

    def __init__(self, team: Team, cleanup: Callable[[], None]):
        self._team = team
        self._cleanup = cleanup
        self._prefix = f"trl_a3po/{next(_runs)}"  # the same in every process: they train in the same order
        self._over = threading.Event()
        self._store: Any = None  # a `torch.distributed.Store`, whose type stub lacks methods used here
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "RankWatch":
        if self._team.size > 1:
            # A separate connection, because a shared one blocks while another thread waits for a key.
            default_store: Any = dist.distributed_c10d._get_default_store()
            self._store = default_store.clone()
            self._store.set_timeout(timedelta(seconds=30))
            self._thread = threading.Thread(target=self._poll, name="a3po rank watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._store is None or error is None:
            return
        try:
            for cause in self._report(f"{type(error).__name__}: {error}"):
                error.add_note(f"{cause}.")
        except RuntimeError as store_error:
            error.add_note(f"{STORE_IS_GONE} ({store_error}); see its own output.")

    def _report(self, error: str) -> list[str]:
        """Write `error`, unless another process has failed before, and wait until the other processes have read it or
        raised too. Returns what this reveals about the cause of the error."""
        unaware = [rank for rank in range(self._team.size) if rank != self._team.rank]
        self._store.compare_set(f"{self._prefix}/failed", "", json.dumps([self._team.rank, error]))
        self._store.set(f"{self._prefix}/knows/{self._team.rank}", "")
        deadline = time.monotonic() + REPORT_TIMEOUT
        while unaware and time.monotonic() < deadline:
            time.sleep(0.1)
            unaware = [rank for rank in unaware if not self._store.check([f"{self._prefix}/knows/{rank}"])]
        silent = [f"process {rank} of {self._team.size} has died or hangs; see its own output" for rank in unaware]
        first = self._first_failure()
        return silent if first is None else [first, *silent]

    def _first_failure(self) -> str | None:
        """Which process failed first, and how; `None` if it was this one."""
        rank, error = json.loads(self._store.get(f"{self._prefix}/failed"))
        return None if rank == self._team.rank else f"process {rank} of {self._team.size} failed: {error}"

    def _poll(self) -> None:
        clock = RunningClock(LONGEST_LOOK)
        changed_at = dict.fromkeys(range(self._team.size), clock())
        heartbeats: dict[int, bytes] = {}
        for beat in itertools.count():
            if self._over.wait(POLL_INTERVAL):
                return
            try:
                self._store.set(f"{self._prefix}/alive/{self._team.rank}", str(beat))
                failure = self._failure(changed_at, heartbeats, clock())
            except RuntimeError as error:
                failure = f"{STORE_IS_GONE} ({error})"
            if failure is not None:
                self._exit(failure)
                return

    def _failure(self, changed_at: dict[int, float], heartbeats: dict[int, bytes], now: float) -> str | None:
        """Which other process failed, and how; `None` if no process did. Updates the last heartbeat of each process
        and when it changed."""
        if self._store.check([f"{self._prefix}/failed"]):
            self._store.set(f"{self._prefix}/knows/{self._team.rank}", "")
            return self._first_failure()
        for rank in range(self._team.size):
            key = f"{self._prefix}/alive/{rank}"
            if rank == self._team.rank or not self._store.check([key]):
                continue
            heartbeat = self._store.get(key)
            if heartbeat != heartbeats.get(rank):
                heartbeats[rank], changed_at[rank] = heartbeat, now
            elif now - changed_at[rank] > HEARTBEAT_TIMEOUT:
                return f"process {rank} of {self._team.size} has given no sign of life for {HEARTBEAT_TIMEOUT:.0f} s"
        return None

    def _exit(self, failure: str) -> None:
        if self._over.wait(EXIT_TIMEOUT):  # this process has raised an error of its own
            return
        print(f"Ending process {self._team.rank} of {self._team.size}: {failure}.", file=sys.stderr, flush=True)
        cleanup = threading.Thread(target=self._cleanup, daemon=True)
        cleanup.start()
        cleanup.join(EXIT_TIMEOUT)
        os._exit(1)
