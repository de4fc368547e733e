"""Keeps files that a worker inherits out of the places of standard input, output and error.

A process can be started without these three, as by `python train.py <&- >&-`, by cron, and by some launchers. The next
files it opens then get the descriptors 0, 1 and 2. A worker's own standard files would replace them, and whatever a
library prints would be written into them.
"""

import contextlib
import os
from collections.abc import Iterator

_LAST_STANDARD_FD = 2


@contextlib.contextmanager
def above_standard_files() -> Iterator[None]:
    """Inside, no file that is opened gets one of the descriptors 0, 1 and 2. Nothing is left open afterwards."""
    with contextlib.ExitStack() as held:
        while True:
            fd = os.open(os.devnull, os.O_RDWR)
            held.callback(os.close, fd)
            if fd > _LAST_STANDARD_FD:
                break
        yield
