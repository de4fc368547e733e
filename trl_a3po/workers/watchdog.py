"""Ends this process when it is frozen, which no thread of it could do: the side of the process that is watched.

Guarantees: from `start` to `stop`, a process whose threads can run no Python code any more prints their stacks and
ends, as `watchdog_process` describes. After `stop`, no thread, process, open file or handler of it is left. Nothing of
it outlives this process.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
from concurrent.futures import Future

from trl_a3po.workers.process import WorkerProcess
from trl_a3po.workers.standard_files import above_standard_files
from trl_a3po.workers.watchdog_process import Note

logger = logging.getLogger(__name__)

MODULE = "trl_a3po.workers.watchdog_process"
BEAT_SECONDS = 1.0
END_SECONDS = 5.0  # for the process to end by itself

# Nobody else uses this one. `faulthandler` handles it without the interpreter lock. Other systems have none to spare.
STACK_SIGNAL = int(signal.SIGRTMAX) - 1 if sys.platform == "linux" else 0


_stacks_go_to: list[int] = []  # open files, the last one of the latest start: a run may be started within a run


class Watchdog:
    """A process that watches this one, once.

    Args:
        note: what this process does from the start, until `note` says something else.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards `_process`
        self._process: WorkerProcess | None = None

    def start(self) -> None:
        """Start the process. Ctrl-C is noticed only if the main thread starts it."""
        with above_standard_files():
            # Standard error may be closed; its descriptor may then belong to another file.
            self._errors = os.open(os.devnull, os.O_WRONLY) if sys.__stderr__ is None else os.dup(2)
            self._signals, self._signals_in = os.pipe()
        os.set_blocking(self._signals_in, False)
        self._old_wakeup_fd = self._forward_signals()
        _stacks_go_to.append(self._errors)
        _register()
        started: Future[WorkerProcess] = Future()
        self._thread = threading.Thread(target=self._beat, args=(started,), name="a3po watchdog", daemon=True)
        self._thread.start()
        self._process = started.result()

    def note(self, note: Note) -> None:
        """Say what this process does from now on. From any thread."""
        with self._lock:
            if self._process is not None:
                self._process.channel.send(note)

    def stop(self) -> None:
        """End the process. Idempotent."""
        if self._thread is None:
            return
        with self._lock:
            self._process = None
        self._over.set()
        self._thread.join()
        self._thread = None
        _stacks_go_to.remove(self._errors)
        _register()
        os.close(self._errors)
        os.close(self._signals)
        if self._stop_forwarding():
            os.close(self._signals_in)

    def _beat(self, started: "Future[WorkerProcess]") -> None:
        try:  # here, because Linux ends the process when the thread that started it ends
            process = WorkerProcess(MODULE, inherit_fds=(self._errors, self._signals))
            process.channel.send((self._errors, self._signals, STACK_SIGNAL))
            process.channel.send(self._note)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        while not self._over.wait(BEAT_SECONDS):
            process.channel.send(None)
        early = process.ended
        process.channel.shutdown()
        how = process.reap(END_SECONDS)
        if early:
            logger.warning("The watchdog of this process had ended (%s). %s", how, process.output_tail)

    # The number of a signal is written where the signal arrives, without the interpreter lock.

    def _forward_signals(self) -> int | None:
        """Have Python write the numbers of signals for the process. Returns what Python wrote them to before, or
        `None` if nothing was changed."""
        if threading.current_thread() is not threading.main_thread():
            return None
        before = signal.set_wakeup_fd(self._signals_in, warn_on_full_buffer=False)
        if before == -1:
            return before
        signal.set_wakeup_fd(before)  # an event loop of the script's needs them
        return None

    def _stop_forwarding(self) -> bool:
        """Whether Python does not write to the file any more."""
        if self._old_wakeup_fd is None:
            return True
        if threading.current_thread() is not threading.main_thread():
            return False
        now = signal.set_wakeup_fd(self._old_wakeup_fd)
        if now != self._signals_in:  # somebody else's
            signal.set_wakeup_fd(now)
        return True


def _register() -> None:
    """Have `STACK_SIGNAL` print the stacks while there is a watchdog."""
    if STACK_SIGNAL and _stacks_go_to:
        faulthandler.register(STACK_SIGNAL, _stacks_go_to[-1], all_threads=True)
    elif STACK_SIGNAL:
        faulthandler.unregister(STACK_SIGNAL)
