"""A process that trains is known to be gone once it is, and only where this can be known."""

import json
import os
import signal
import subprocess
import sys

import pytest

from trl_a3po.report import run_process
from trl_a3po.report.run_process import is_gone, is_running, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
WAITS = """
import json, time
from trl_a3po.report.run_process import this_process
print(json.dumps(this_process()), flush=True)
time.sleep(600)
"""


@pytest.fixture
def child():
    """A process that has described itself, and the description as a timeline holds it."""
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        yield process, json.loads(process.stdout.readline())
        process.kill()


def killed(process):
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie


def test_a_process_is_gone_at_once_when_it_is_killed(child):
    process, described = child
    assert described["pid"] == process.pid and not is_gone(described) and is_running(described)
    killed(process)
    assert is_gone(described), "its parent has not asked for its exit code yet"
    process.wait()
    assert is_gone(described) and not is_running(described)


def test_a_process_that_was_given_the_id_later_is_not_taken_for_it():
    described = this_process()
    assert not is_gone(described)
    assert is_gone(described | {"started": described["started"] - 1})


@pytest.mark.parametrize("unknown", [None, {"machine": "another"}, {"machine": None}])
def test_where_it_cannot_be_known_nobody_is_said_to_be_gone_or_there(child, unknown):
    process, described = child
    assert not is_running(unknown and described | unknown)
    killed(process)
    assert not is_gone(unknown and described | unknown)


def test_a_process_of_another_user_is_seen_where_it_is_not_hidden(child, monkeypatch):
    def refuse(pid, number):
        raise PermissionError

    def seen():
        with monkeypatch.context() as patched:
            patched.setattr(run_process.os, "kill", refuse)
            return is_gone(described)

    process, described = child
    assert not seen()
    killed(process)
    assert seen()
    process.wait()  # no file of it is there any more, as if it were hidden
    assert not seen()


def test_a_process_whose_state_may_not_be_read_is_not_said_to_be_gone(child, monkeypatch):
    """As where `/proc` hides what is in it from other users."""

    def refuse(pid):
        raise PermissionError

    monkeypatch.setattr(run_process, "_state", refuse)
    assert not is_gone(child[1]) and not is_running(child[1])


def test_another_clock_is_another_machine(child, monkeypatch):
    """The start of a process is counted by the clock of the namespace that asks."""
    read = os.readlink
    monkeypatch.setattr(run_process.os, "readlink", lambda link: read(link) + ("1" if link.endswith("time") else ""))
    process, described = child
    killed(process)
    assert not is_gone(described)


def test_a_system_that_does_not_tell_has_no_description(monkeypatch):
    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(run_process.os, "readlink", refuse)
    assert this_process() is None
    monkeypatch.undo()
    monkeypatch.setattr(run_process, "_state", refuse)
    assert this_process() is None
