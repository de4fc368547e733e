"""Waiting on a worker: for what it says, what it prints, and room for what is still to be sent to it.

Guarantees: what the worker prints is read as long as somebody waits, so it never blocks on its own output.
"""

import selectors

from trl_a3po.workers.process import WorkerProcess


class Listener:
    """Used in a `with` block, by one thread."""

    def __init__(self, worker: WorkerProcess):
        self._worker = worker
        self._selector = selectors.DefaultSelector()
        self._selector.register(worker.channel, selectors.EVENT_READ)
        self._selector.register(worker.output_fd, selectors.EVENT_READ)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *exception) -> None:
        self._selector.close()

    def wait(self, timeout: float, *, flushed: bool) -> None:
        """Wait up to `timeout` seconds until there may be something to receive, or, unless all is `flushed`, something
        more can be sent."""
        self._selector.modify(self._worker.channel, selectors.EVENT_READ | (0 if flushed else selectors.EVENT_WRITE))
        for key, _ in self._selector.select(timeout):
            if key.fileobj == self._worker.output_fd and not self._worker.read_output():
                self._selector.unregister(self._worker.output_fd)
