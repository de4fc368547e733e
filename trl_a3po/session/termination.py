"""Ending a run in order: on SIGTERM, which SLURM, Kubernetes and the owners of spot instances send before they kill,
and on Ctrl-C.

Guarantees:
- the first SIGTERM of a run asks for its end, and interrupts nothing: the run ends after the optimizer step under way,
  or at once where it waits for rollouts between two optimizer steps, in all of its processes at the same step;
- another SIGTERM, later than `DUPLICATE_SECONDS` after the first, or a SIGINT, ends the process at once;
- a SIGINT (Ctrl-C) where there is something to save asks for the end in the same way, and the next one raises
  `KeyboardInterrupt` at once; where there is nothing to save, the first one does;
- the user's own handler is called too, and the handlers of before are back after `listening`. Where no handler can be
  set, which is in any thread but the main one, and where SIGTERM is ignored, nothing changes.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

DUPLICATE_SECONDS = 5.0
"""A launcher passes on the SIGTERM that its processes have also received themselves; within this time it is one."""


class StopRequested(Exception):
    """The run ends here, between two optimizer steps, because of a signal. `train` turns it into `Terminated`, or into
    `KeyboardInterrupt`."""


class Termination(TrainerCallback):
    """Whether and where a run ends early.

    Args:
        in_any_process: tells all processes whether one of them has said `True`; every process calls it together.
        saves: whether the run then saves a checkpoint.
    """

    def __init__(self, in_any_process: Callable[[bool], bool], saves: Callable[[], bool]):
        self._in_any_process = in_any_process
        self._saves = saves
        self._requested_at: float | None = None
        self._stops = self._inside_step = self._may_interrupt = False
        self._step = self._saved_step = 0
        self.interrupted = False  # by Ctrl-C

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, a SIGTERM or a Ctrl-C asks for the end of the run."""
        self._requested_at, self._stops, self._inside_step, self.interrupted = None, False, False, False
        self._step = self._saved_step = 0
        before = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
            yield  # a handler that is `None` was not set by Python, and Python could not set it again
            return
        handle, interrupt = _Handler(self._request, before), signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGTERM, handle)
        if interrupt is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is handle:  # the user may have set another one meanwhile
                signal.signal(signal.SIGTERM, before)
            now = signal.getsignal(signal.SIGINT)
            if interrupt is not None and (now == self._interrupt or self._requested_at is not None):
                signal.signal(signal.SIGINT, interrupt)

    def should_save(self, step: int) -> bool:
        """Whether a run that ends at `step` has a checkpoint to save."""
        return self._saves() and step > self._saved_step

    @contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """Inside, and at its beginning, `raise_if_requested` raises."""
        self._may_interrupt = True
        try:
            self.raise_if_requested()
            yield
        finally:
            self._may_interrupt = False

    def raise_if_requested(self) -> None:
        """Called in the main process while it waits for rollouts.

        Raises:
            StopRequested: this process has received SIGTERM or SIGINT, and no micro-step has been trained since the
                last optimizer step.
        """
        if self._may_interrupt and not self._inside_step and self._requested_at is not None:
            logger.warning("%s: the run ends here, where it waits for rollouts.", self._signal)
            raise StopRequested

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step = self._saved_step = (
            state.global_step
        )  # of the checkpoint that is resumed; at step 0 there is nothing to save

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self._inside_step = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._inside_step, self._step = False, state.global_step
        self._stops = self._in_any_process(self._requested_at is not None) and not control.should_training_stop
        if self._stops:
            logger.warning("%s: the run ends after optimizer step %d.", self._signal, state.global_step)
            control.should_evaluate = False
            control.should_save = self.should_save(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._saved_step = state.global_step

    # The next events after a step has been logged and saved.

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._stops:
            raise StopRequested

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._stops:
            raise StopRequested

    @property
    def _signal(self) -> str:
        return "Ctrl-C" if self.interrupted else "SIGTERM"

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C."""
        if self._requested_at is not None or not self.should_save(self._step):
            raise KeyboardInterrupt
        self._requested_at, self.interrupted = time.monotonic(), True
        logger.warning(
            "Ctrl-C: the run ends, with a checkpoint, after the optimizer step under way. Another Ctrl-C ends it at "
            "once, without."
        )

    def _request(self) -> None:
        """The first SIGTERM, or a later one."""
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        elif now - self._requested_at > DUPLICATE_SECONDS:
            _die(signal.SIGTERM)


class _Handler:
    """Calls `request`, then the handler of `before`."""

    def __init__(self, request: Callable[[], None], before: Any):
        self._request = request
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._request()
        if callable(self.before):
            self.before(number, frame)


def _take_back() -> None:
    """A process that was forked from the trainer, such as one of a reward function, ends on SIGTERM as before."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _Handler):
        signal.signal(signal.SIGTERM, handler.before)


os.register_at_fork(after_in_child=_take_back)


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
