"""The timeline of a run that may still be going on, read while it grows.

Guarantees: only reads; `lines` are those of `read_timeline`, also where a full file has been continued in another; a
line that is only half written is read once it is whole; a file that was replaced or became shorter is read again from
its beginning.
"""

import os
from pathlib import Path
from typing import Any

from trl_a3po.report.lineage import Lineage
from trl_a3po.report.timeline import OLDER, whole_lines


class Tail:
    """Follows a timeline.

    Args:
        path: the file, which may not exist yet.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lineage = Lineage(path)
        self._inode: int | None = None
        self._read = 0  # bytes
        self._half = b""  # of a line

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines read so far of the run that was started or resumed last."""
        return self._lineage.lines

    def read(self) -> bool:
        """Read what was written since the last call. Returns whether there was something new.

        Raises:
            ValueError: the file is not a timeline.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._read:
                self._begin(status.st_ino)
            file.seek(self._read)
            content = file.read()
        self._read += len(content)
        *whole, self._half = (self._half + content).split(b"\n")
        for line in whole:
            self._lineage.add(line.decode("utf-8", errors="replace"))
        return bool(whole)

    def _begin(self, inode: int) -> None:
        """Go back to the beginning of the file with this number, which is that of the one it continues."""
        self._lineage, self._inode, self._read, self._half = Lineage(self.path), inode, 0, b""
        older = self.path.with_name(OLDER)
        if older.is_file() and older.stat().st_ino != inode:  # else the file has just become the older one
            for line in whole_lines(older):
                self._lineage.add(line)
