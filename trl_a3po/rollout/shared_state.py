"""What the threads of a `GenerationQueue` share: the queue's decisions, the lock that guards them, and how it ends.

Guarantees: the first error ends the queue, and every thread sees it; every change wakes the threads that wait.
"""

import logging
import threading
import time
from collections.abc import Callable

from trl_a3po.errors import A3POError, EngineError, QueueClosed
from trl_a3po.rollout.evaluation_requests import EvaluationRequests
from trl_a3po.rollout.queue_core import QueueCore

logger = logging.getLogger(__name__)


class SharedState:
    """`changed` guards everything here, the core included, and is notified of every change."""

    def __init__(self, core: QueueCore, running: Callable[[], float]):
        self.running = running  # stands still while this process is stopped
        self.changed = threading.Condition()
        self.core = core
        self.evaluation: EvaluationRequests | None = None
        self.to_cancel: list[int] = []  # request ids for the rollout thread
        self.error: A3POError | None = None
        self.closed = False
        self.last_progress = running()
        self.events = 0
        self._blocked_since: float | None = None
        self._blocked_seconds = 0.0

    @property
    def over(self) -> bool:
        """The queue is closed, or was stopped by an error."""
        return self.closed or self.error is not None

    def progress(self) -> None:
        """Note that something has happened, and wake the threads that wait. The caller holds the lock."""
        self.last_progress = self.running()
        self.events += 1
        self.changed.notify_all()

    def raise_if_over(self) -> None:
        """Raise the error that stopped the background work, as a new exception each time, or `QueueClosed`."""
        with self.changed:
            if self.error is not None:
                raise type(self.error)(*self.error.args) from (self.error.__cause__ or self.error)
            if self.closed:
                raise QueueClosed("The queue is closed: nothing can be taken from it or published to it any more.")

    def fail(self, error: BaseException) -> None:
        """Stop the queue because a background thread has ended with `error`. If the queue was stopping anyway, the
        error is only logged."""
        with self.changed:
            if self.over:
                logger.warning("The %s failed while stopping: %r", threading.current_thread().name, error)
                return
            self.error = _as_a3po_error(error)
            self.changed.notify_all()

    def set_blocked_by_staleness(self, blocked: bool) -> None:
        """Note whether `max_staleness` holds the next prompt back from now on. The caller holds the lock."""
        now = time.monotonic()
        if self._blocked_since is not None:
            self._blocked_seconds += now - self._blocked_since
        self._blocked_since = now if blocked else None

    @property
    def staleness_blocked_seconds(self) -> float:
        """For how long `max_staleness` has held the next prompt back so far, in all."""
        return self._blocked_seconds + (0.0 if self._blocked_since is None else time.monotonic() - self._blocked_since)


def _as_a3po_error(error: BaseException) -> A3POError:
    if isinstance(error, A3POError):
        return error
    raised = EngineError(f"The {threading.current_thread().name} stopped: {type(error).__name__}: {error}")
    raised.__cause__ = error
    return raised
