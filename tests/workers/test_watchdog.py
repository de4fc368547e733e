"""The process that ends a frozen one: when it does, when it does not, and what it leaves."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.workers.processes import is_gone, until
from trl_a3po.workers.watchdog import STACK_SIGNAL, Watchdog
from trl_a3po.workers.watchdog_process import GRACE_SECONDS, TICK, Note, Silence, report

LONG = 3600.0
STOPPED = 2.0
SCRIPT = """
import itertools, os, time
from trl_a3po.workers.watchdog import Watchdog
from trl_a3po.workers.watchdog_process import Note

def holds_the_lock():
    max(itertools.repeat(1))  # a C function that never ends

watchdog = Watchdog(Note({limit}, "at the start", "Set this."))
watchdog.start()
print(watchdog._process.pid, flush=True)
watchdog.note(Note({limit}, "while it slept", "Set that."))
{then}
"""


@pytest.fixture
def script():
    """(what it does after the start, seconds of silence that are allowed) -> a process, and the watchdog's id."""
    started = []

    def start(then, limit):
        source = SCRIPT.format(limit=limit, then=textwrap.dedent(then))
        process = subprocess.Popen([sys.executable, "-c", source], stdout=-1, stderr=-1, text=True)
        started.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_frozen_process_prints_its_stacks_and_what_to_set_and_ends(script):
    process, watchdog = script("holds_the_lock()", limit=1.5)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "in holds_the_lock" in errors
    assert "frozen for 2 s while it slept:" in errors and errors.rstrip().endswith("Set that.")
    until(lambda: is_gone(watchdog))


def test_ctrl_c_ends_a_frozen_process_long_before_its_limit(script):
    process, _ = script("holds_the_lock()", limit=LONG)
    time.sleep(1.0)  # it holds the lock by then
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and "Ctrl-C was pressed" in errors


def test_ctrl_c_is_a_keyboard_interrupt_where_python_runs(script):
    process, watchdog = script("time.sleep(3600)", limit=LONG)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt") and "trl_a3po has ended" not in errors
    until(lambda: is_gone(watchdog))


def test_a_stopped_process_goes_on_where_it_was(script):
    process, _ = script("time.sleep(1)", limit=STOPPED)
    process.send_signal(signal.SIGSTOP)
    time.sleep(2 * STOPPED)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0


def test_time_without_a_look_is_not_silence():
    silence = Silence()
    silence.passed(LONG, heard=False, stopped=False)
    assert silence.seconds == 2 * TICK
    silence.passed(TICK, heard=False, stopped=True)
    assert silence.seconds == 2 * TICK and not silence.is_over(3 * TICK)
    silence.passed(TICK, heard=True, stopped=False)
    assert silence.seconds == 0.0


def test_an_interrupt_counts_until_the_process_is_heard():
    silence = Silence()
    silence.interrupted = True
    silence.seconds = GRACE_SECONDS + TICK
    assert silence.is_over(LONG) and "Ctrl-C" in report(Note(LONG, "", ""), silence)
    silence.passed(TICK, heard=True, stopped=False)
    silence.seconds = GRACE_SECONDS + TICK
    assert not silence.is_over(LONG)


def test_nothing_is_left_of_it():
    def left():
        return sorted(os.listdir("/proc/self/fd")), threading.enumerate(), signal.set_wakeup_fd(-1)

    before = left()
    outer, inner = (Watchdog(Note(LONG, "", "")) for _ in range(2))
    outer.start()
    inner.start()
    processes = [watchdog._process.pid for watchdog in (outer, inner)]
    inner.stop()
    os.kill(os.getpid(), STACK_SIGNAL)  # ends a process that has no handler for it
    outer.stop()
    outer.stop()
    outer.note(Note(LONG, "after the end", ""))
    assert left() == before and all(map(is_gone, processes))
