"""The folder in which an engine writes weights for its servers to read.

Guarantees: each engine has its own; it is removed when the engine is closed, at the end of the process that made it
(not of a forked copy), or, where that was killed, by the next engine that is started in the same place on the same
machine. Whether its process lives is shown by a lock on a file in it, which ends with the process. Where the file
system has no locks, or on another machine, whose locks it may not show, what a killed process has left stays.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import uuid
import weakref
from pathlib import Path
from typing import TextIO

_LOCK = "lock"


class EngineFolder:
    """
    Args:
        place: where it will be, beside those of other engines.
    """

    def __init__(self, place: Path):
        self.path = place.absolute() / f"engine-{uuid.uuid4().hex[:8]}"
        self._owner = os.getpid()
        self._lock: TextIO | None = None

    def make(self) -> None:
        remove_leftovers(self.path.parent)
        self.path.mkdir(parents=True)
        weakref.finalize(self, _remove, self.path, self._owner)
        new = self.path / f"{_LOCK}-new"  # it gets its name when it is locked: others look at that
        lock = self._lock = new.open("w")
        lock.write(socket.gethostname())
        lock.flush()
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.path / _LOCK)

    def remove(self) -> None:
        _remove(self.path, self._owner)
        if self._lock is not None:
            self._lock.close()


def remove_leftovers(place: Path) -> None:
    """Remove the folders of engines whose processes were killed."""
    for lock in place.glob(f"engine-*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:  # held by a process that lives, or removed
            if file.read() != socket.gethostname():
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
