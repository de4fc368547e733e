"""Ends this process when another one of the run has failed and this one would wait for it for ever.

A process that raises, is killed or hangs leaves the others inside a collective, where no exception reaches them. So
each process runs one thread that looks at the key-value store by which the processes found each other, on whatever
machine that is: a process that raises leaves its error there, and each leaves a sign of life.

Guarantees: `GRACE_SECONDS` after another process has failed, or `SILENT_SECONDS` and those after it has fallen silent,
this process has raised by itself, or says why on standard error, frees what it holds and exits with status 1. The
error that came first is the one that is told; a process that raises waits up to `TELL_SECONDS` until the others have
read it, because the store may end with it. No collective is used, and nothing happens in a run of one process.
"""

import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from trl_a3po.distributed.team import Team

logger = logging.getLogger(__name__)

LOOK_SECONDS, SILENT_SECONDS, GRACE_SECONDS, TELL_SECONDS = 1.0, 90.0, 10.0, 5.0
_runs = itertools.count()


class Watch:
    """A context around what all processes do together.

    Args:
        team: the processes.
        free: ends what would outlive this process; called before it exits.
    """

    def __init__(self, team: Team, free: Callable[[], None]):
        self._team = team
        self._free = free
        self._prefix = f"trl_a3po/{next(_runs)}"  # the same in every process: they train in the same order
        self._over = threading.Event()
        self._store: dist.Store | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        if self._team.size > 1:
            # A connection of its own: one that is shared blocks while another thread waits for a key.
            self._store = dist.distributed_c10d._get_default_store().clone()
            self._store.set_timeout(timedelta(seconds=30))
            self._thread = threading.Thread(target=self._look, name="a3po watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._over.set()
        if self._store is not None and error is not None:
            try:
                for cause in self._tell(f"{kind.__name__}: {error}"):
                    error.add_note(f"{cause}.")
            except RuntimeError as gone:
                logger.warning("The other processes could not be told of this error: %s", gone)

    def _tell(self, error: str) -> list[str]:
        """Leave `error`, unless another process has failed before, until each of the others has read what is there or
        raised too; what that says about where the error may come from."""
        others = [rank for rank in range(self._team.size) if rank != self._team.rank]
        self._store.compare_set(f"{self._prefix}/failed", "", json.dumps([self._team.rank, error]))
        self._store.set(f"{self._prefix}/knows/{self._team.rank}", "")
        until = time.monotonic() + TELL_SECONDS
        while others and time.monotonic() < until:
            time.sleep(0.1)
            others = [rank for rank in others if not self._store.check([f"{self._prefix}/knows/{rank}"])]
        silent = [
            f"process {rank} of {self._team.size} has died or hangs, and its own output says why" for rank in others
        ]
        first = self._failed()
        return silent if first is None else [first, *silent]

    def _failed(self) -> str | None:
        """Which other process failed first, and how."""
        rank, error = json.loads(self._store.get(f"{self._prefix}/failed"))
        return None if rank == self._team.rank else f"process {rank} of {self._team.size} failed: {error}"

    def _look(self) -> None:
        heard = dict.fromkeys(range(self._team.size), time.monotonic())
        signs: dict[int, bytes] = {}
        for beat in itertools.count():
            if self._over.wait(LOOK_SECONDS):
                return
            try:
                why = self._failure(beat, heard, signs)
            except RuntimeError as error:
                why = f"the process that holds the run together is gone ({error})"
            if why is not None:
                self._end(why)
                return

    def _failure(self, beat: int, heard: dict[int, float], signs: dict[int, bytes]) -> str | None:
        """Which other process failed, and how; `None` if none did. Leaves a sign of life."""
        store, mine, now = self._store, self._team.rank, time.monotonic()
        store.set(f"{self._prefix}/alive/{mine}", str(beat))
        if store.check([f"{self._prefix}/failed"]):
            store.set(f"{self._prefix}/knows/{mine}", "")
            return self._failed()
        for rank in range(self._team.size):
            key = f"{self._prefix}/alive/{rank}"
            if rank == mine or not store.check([key]):
                continue
            sign = store.get(key)
            if sign != signs.get(rank):
                signs[rank], heard[rank] = sign, now
            elif now - heard[rank] > SILENT_SECONDS:
                return f"process {rank} of {self._team.size} has given no sign of life for {SILENT_SECONDS:.0f} s"
        return None

    def _end(self, why: str) -> None:
        if self._over.wait(GRACE_SECONDS):  # it raised by itself
            return
        print(f"Ending process {self._team.rank} of {self._team.size}: {why}.", file=sys.stderr, flush=True)
        freeing = threading.Thread(target=self._free, daemon=True)
        freeing.start()
        freeing.join(GRACE_SECONDS)
        os._exit(1)
