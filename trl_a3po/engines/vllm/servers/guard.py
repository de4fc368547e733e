"""Runs a command that ends with us: `python guard.py PARENT FOLDER COMMAND...`, in a session of its own.

It ends the command, and all that the command started, when standard input is closed or the process `PARENT` is gone;
`FOLDER`, unless it is "", is then removed. Imports nothing but the standard library.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys


def main() -> None:
    parent, folder = int(sys.argv[1]), sys.argv[2]
    child = subprocess.Popen(sys.argv[3:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: _end(child))
    while child.poll() is None:
        closed, _, _ = select.select([sys.stdin], [], [], 0.5)
        if closed or os.getppid() != parent:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            _end(child)
    os._exit(child.returncode if child.returncode >= 0 else 128 - child.returncode)


def _end(child: subprocess.Popen[bytes]) -> None:
    """A chance to say goodbye, then the whole group, this process with it."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(3)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
