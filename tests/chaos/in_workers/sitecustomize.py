"""Python imports this as it starts, in the workers of a chaotic run: what a worker does wrong when it is asked to.

Guarantees: SIGUSR1 has a worker send bytes that are not a message; SIGUSR2 has it end and leave a child that holds its
socket. A worker runs as `python -m MODULE SOCKET PARENT`.
"""

import contextlib
import os
import signal
import sys
import time


def garbage(*_):
    with contextlib.suppress(BlockingIOError):
        os.write(int(sys.argv[1]), b"<html>502 Bad gateway</html>")


def child_with_the_socket(*_):
    if os.fork():
        os._exit(3)
    time.sleep(3600)


signal.signal(signal.SIGUSR1, garbage)
signal.signal(signal.SIGUSR2, child_with_the_socket)
