"""A run whose processes are stopped for longer than every timeout, as by a suspended node, goes on when they are
continued."""

import os
import subprocess
import time

import pytest
from transformers import TrainerCallback

from tests.runs import build, logged

TIMEOUT, STOPPED = 5, 9


def slow_reward(completion_ids, **kwargs):
    time.sleep(1.0)
    return [float(len(set(ids))) for ids in completion_ids]


class Stops(TrainerCallback):
    """Has a process stopped while the next batch is sampled and scored, and continued. Only then is the stall_timeout
    short: a worker may take longer to start."""

    def __init__(self, pid):
        self.pid = pid
        self.stop = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer._session.queue._stall_timeout = TIMEOUT
            pid = self.pid(self.trainer)
            self.stop = subprocess.Popen(
                ["sh", "-c", f"sleep 0.3; kill -STOP {pid}; sleep {STOPPED}; kill -CONT {pid}"]
            )


def train_stopped(pid, model, folder, **settings):
    callback = Stops(pid)
    settings = {"stall_timeout": 120, "reward_timeout": TIMEOUT, "max_steps": 2, **settings}
    trainer = callback.trainer = build(model, folder, callbacks=[callback], reward_funcs=slow_reward, **settings)
    trainer.train()
    callback.stop.wait(60)
    assert len(logged(trainer, "loss")) == 2
    return trainer


@pytest.mark.long
def test_a_stop_of_the_trainer_does_not_end_the_run(model_path, tmp_path):
    trainer = train_stopped(lambda trainer: os.getpid(), model_path, tmp_path)
    assert logged(trainer, "a3po/time/wait")[1] > STOPPED - 1


@pytest.mark.long
def test_a_stop_of_a_reward_worker_does_not_end_the_run(model_path, tmp_path, caplog):
    def worker(trainer):
        (idle,) = trainer._session._scorer._idle
        return idle.process.pid

    trainer = train_stopped(worker, model_path, tmp_path, reward_workers=1, reward_timeout=None)
    assert "Training waits: a reward worker (process" in caplog.text
    assert logged(trainer, "a3po/outcomes/rejected")[-1] == 0


@pytest.mark.long
def test_a_stop_of_the_engines_worker_does_not_end_the_run_and_is_named(model_path, tmp_path, caplog):
    settings = {"engine": "transformers", "max_completion_length": 64, "delivery_check_steps": 1}
    pids = []

    def worker(trainer):
        pids.append(trainer._session.engine.worker_pid)
        return pids[0]

    trainer = train_stopped(worker, model_path, tmp_path, **settings)
    assert sum(logged(trainer, "a3po/engine/restarts")) == 0
    assert f"its worker (process {pids[0]}) is stopped, and `kill -CONT {pids[0]}` has it go on" in caplog.text
