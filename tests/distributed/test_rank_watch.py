"""A process that would wait indefinitely for one that failed ends by itself, even without a launcher."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.distributed.launch import ROOT, free_port

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("fault", "found_by", "why"),
    [
        ("raises", "port", "Ending process 0 of 2: process 1 of 2 failed: ZeroDivisionError: of process 1."),
        pytest.param(
            "raises",
            "file",
            "Ending process 0 of 2: process 1 of 2 failed: ZeroDivisionError: of process 1.",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "hangs",
            "port",
            "Ending process 0 of 2: process 1 of 2 has given no sign of life for 3 s.",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_process_that_waits_for_a_failed_one_reports_it_cleans_up_and_exits(tmp_path, fault, found_by, why):
    environment = {}
    if found_by == "port":
        environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meeting = [str(tmp_path / "meeting")] if found_by == "file" else []
    with watched(fault, *meeting, **environment) as processes:
        printed, _ = processes[0].communicate(timeout=240)
        assert processes[0].returncode == 1
        assert why in printed and "freed" in printed, printed


@pytest.mark.long
def test_processes_that_are_stopped_together_and_continued_go_on(tmp_path):
    with watched("goes on", str(tmp_path / "meeting")) as processes:
        assert [process.stdout.readline() for process in processes] == ["watching\n"] * 2
        time.sleep(3.0)  # heartbeats of both
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(15.0)  # longer than the heartbeat's limit
        for process in processes:
            process.send_signal(signal.SIGCONT)
            time.sleep(2.0)
        (tmp_path / "meeting.over").touch()
        assert [process.wait(240) for process in processes] == [0, 0]


@contextmanager
def watched(*arguments, **environment):
    """Two processes that run `tests.distributed.watched`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    inherited |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.watched", *arguments],
            cwd=ROOT,
            env={**inherited, **environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
