"""Whatever a worker process does wrong, whoever uses it notices, says why, and leaves nothing behind.

Every kind of worker goes through the same faults: the worker of an engine, and the reward worker.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from tests.rewards.test_worker_pool import state
from tests.workers.processes import is_gone, is_reaped, until
from trl_a3po.engines import supervisor
from trl_a3po.engines.transformers import transformers_engine
from trl_a3po.errors import EngineError, RewardError
from trl_a3po.protocol.engine import GroupRequest
from trl_a3po.protocol.records import Group, Prompt, Rejection, Rollout
from trl_a3po.rewards import worker_pool
from trl_a3po.workers.process import WorkerProcess, worker_environment

FAULTY = "tests.workers.faulty_worker"
CLOSE_TIMEOUT = 10.0


class NoStaging:
    fds = ()

    def handle(self):
        return None

    def close(self):
        pass


class TransformersWorker:
    def __init__(self, monkeypatch, timeout):
        self.user = supervisor.Supervisor(
            partial(WorkerProcess, FAULTY, threads=1), b"", NoStaging(), 0, max_restarts=0
        )
        self.user.start(30.0)

    def begin(self):
        self.user.submit([GroupRequest(0, 0, (5,), 1)])

    def process(self) -> WorkerProcess | None:
        return self.user._worker

    def report(self) -> str:
        """What the user of the worker is told of its end."""
        events = []
        with pytest.raises(EngineError) as error:
            while True:
                events += self.user.wait(30.0)
        assert [event.request_id for event in events] == [0]
        return f"{events[0].reason}\n{error.value}"

    def close(self):
        self.user.close()


class RewardWorker:
    overdue = "reward timeout"

    def __init__(self, monkeypatch, timeout):
        monkeypatch.setattr(worker_pool, "MODULE", FAULTY)
        self.user = worker_pool.RewardWorkers([len], ["length"], lambda group: [], state, workers=1, timeout=timeout)
        self.user.start()
        self.verdicts = []
        self.thread = threading.Thread(target=self._score, daemon=True)

    def _score(self):
        rollout = Rollout([5], [-1.0], [0])
        try:
            self.verdicts.append(self.user(Group(Prompt(0, {"prompt": "p"}, [5]), [rollout])))
        except RewardError as error:
            self.verdicts.append(error)

    def begin(self):
        self.thread.start()

    def process(self) -> WorkerProcess | None:
        return next((worker.process for worker in self.user._busy), None)

    def report(self) -> str:
        until(lambda: self.verdicts)
        assert isinstance(self.verdicts[0], Rejection)
        return self.verdicts[0].reason

    def close(self):
        self.user.close()
        self.thread.join(CLOSE_TIMEOUT)


KINDS = {"transformers": TransformersWorker, "reward": RewardWorker}


@pytest.fixture(params=KINDS)
def working(request, monkeypatch):
    """`working(fault)`: the user of a worker that has begun its first task, and the worker's process. `timeout` limits
    the worker's silence, or the time for its task."""
    started = []

    def start(fault, timeout=60.0):
        monkeypatch.setenv("A3PO_TEST_WORKER", f"{request.param} {fault}")
        user = KINDS[request.param](monkeypatch, timeout)
        started.append(user)
        user.begin()
        until(lambda: user.process() is not None)
        process = user.process()
        until(lambda: process.ended or "working" in process.output_tail)
        return user, process

    yield start
    for user in started:
        user.close()


def test_a_killed_worker_is_noticed_and_reaped(working):
    user, process = working("none")
    os.kill(process.pid, signal.SIGKILL)
    assert "SIGKILL" in user.report()
    assert is_reaped(process.pid)


def test_a_worker_that_exits_while_its_child_holds_the_socket_is_noticed_and_both_are_ended(working):
    user, process = working("fork")
    assert "exit code 3" in user.report()
    child = int(re.search(r"child (\d+)", process.output_tail)[1])
    assert is_reaped(process.pid)
    until(lambda: is_gone(child))


def test_what_a_worker_printed_before_it_exited_is_reported(working, caplog):
    user, _ = working("exit")
    report = user.report() + caplog.text
    assert "exit code 4" in report and "a last line" in report


def test_a_worker_that_sends_garbage_is_killed(working):
    user, process = working("garbage")
    assert "killed because it sent bytes that are not a message" in user.report()
    assert is_reaped(process.pid)


@pytest.mark.parametrize("working", ["reward"], indirect=True)
def test_a_stopped_worker_is_killed_where_its_time_is_limited(working):
    user, process = working("none", timeout=1.0)
    os.kill(process.pid, signal.SIGSTOP)
    assert user.overdue in user.report()
    assert is_reaped(process.pid)


def test_close_is_bounded_and_leaves_no_process_thread_or_open_file(working):
    files, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    user, process = working("none")
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    user.close()
    assert time.monotonic() - began < CLOSE_TIMEOUT
    assert is_reaped(process.pid)
    until(lambda: set(threading.enumerate()) <= threads, CLOSE_TIMEOUT)
    assert set(os.listdir("/proc/self/fd")) <= files


OWNER = """
import sys
from trl_a3po.workers.process import WorkerProcess

worker = WorkerProcess(sys.argv[1], shows_output=True)
print(worker.pid, flush=True)
worker.channel.send("a task")
while True:
    worker.read_output()
"""


@pytest.mark.parametrize("module", [transformers_engine.WORKER, worker_pool.MODULE, FAULTY])
def test_no_worker_outlives_the_process_that_started_it(module):
    environment = worker_environment(threads=1) | {"A3PO_TEST_WORKER": "other none"}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, module], stdout=subprocess.PIPE, text=True, env=environment)
    pid = int(owner.stdout.readline())
    if module == FAULTY:  # which is at work then, and reads its socket no more
        assert owner.stdout.readline() == "working\n"
    assert not is_gone(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: is_gone(pid))
