"""What a command does when nobody reads its output any more, as behind `| head -1`.

Guarantees: it ends quietly, with the exit code of a Unix tool; a connection that somebody else closed stays an error.
"""

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def quiet_when_unread() -> Iterator[None]:
    """End the process quietly if the block fails because its output is not read any more."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it is None in a process without one
                sys.stdout.flush()  # else the interpreter does it at its end, and complains
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _is_unread(stream)]
        if not unread:
            raise
        for stream in unread:
            _discard(stream)
        sys.exit(128 + signal.SIGPIPE)  # what a shell says of a process that SIGPIPE has ended


def _is_unread(stream: TextIO) -> bool:
    """Whether the stream is a pipe whose other end is closed."""
    try:
        file = stream.fileno()
    except io.UnsupportedOperation:  # a notebook's
        return False
    state = select.poll()
    state.register(file, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in state.poll(0))


def _discard(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
