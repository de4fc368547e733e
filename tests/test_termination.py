"""SIGTERM and Ctrl-C: the run ends at an optimizer step, with a checkpoint from which it goes on exactly."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from transformers import TrainerControl, TrainerState

from tests.runs import COMPLETE, build, reward
from tests.tiny import tiny_prompts
from tests.workers.processes import until
from trl_a3po import A3POTrainer
from trl_a3po.checkpoints import checkpoint
from trl_a3po.errors import Terminated
from trl_a3po.session import termination
from trl_a3po.session.termination import StopRequested, Termination
from trl_a3po.testing import StubEngine

pytestmark = pytest.mark.long

STEPS, AT = 6, 3


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


class Terminating(A3POTrainer):
    """Receives SIGTERM once, or Ctrl-C `interrupts` times, at `moment` of optimizer step `AT`."""

    moment: str | None = None
    interrupts = 0

    def now(self, moment):
        if moment == self.moment and self.state.global_step == AT:
            self.moment = None
            for _ in range(self.interrupts):
                os.kill(os.getpid(), signal.SIGINT)
            if not self.interrupts:
                sigterm()

    def training_step(self, *args, **kwargs):
        if self._step % 2:
            self.now("inside a step")
        return super().training_step(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        self.now("evaluation")
        return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, *args, **kwargs):
        self.now("save")
        return super()._save_checkpoint(*args, **kwargs)

    def _take(self):
        self.now("take")
        return super()._take()


class WaitsAfterSigterm(StubEngine):
    """Has nothing more to give once `silent` is true."""

    def __init__(self, silent):
        super().__init__(COMPLETE)
        self.silent = silent

    def wait(self, timeout):
        if self.silent():
            time.sleep(min(timeout, 0.05))
            return []
        return super().wait(timeout)


def run(model_path, folder, **settings):
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 4, "num_iterations": 2} | settings
    return build(model_path, folder, Terminating, **settings)


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    "moment", ["inside a step", *(pytest.param(m, marks=pytest.mark.long) for m in ("evaluation", "save", "take"))]
)
def test_a_run_that_received_sigterm_goes_on_as_if_it_had_not(model_path, tmp_path, moment):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": tiny_prompts(4)}
    if moment == "save":
        settings["save_steps"] = 1
    if moment == "take":
        settings["num_iterations"] = 1
        del settings["eval_strategy"], settings["eval_steps"]
    whole = run(model_path, tmp_path / "whole", **settings)
    whole.train()
    stopped = run(model_path, tmp_path / "parts", **settings)
    stopped.moment = moment
    with pytest.raises(Terminated) as ended:
        stopped.train()
    assert ended.value.code == Terminated.exit_code == 75
    step = AT if moment in ("evaluation", "take") else AT + 1
    assert f"optimizer step {step};" in str(ended.value)
    folders = checkpoint.checkpoints(tmp_path / "parts" / "Terminating")
    assert folders[-1].name == f"checkpoint-{step}" and checkpoint.why_invalid(folders[-1]) is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resumed = run(model_path, tmp_path / "parts", **settings)
    resumed.train(resume_from_checkpoint=True)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], value, rtol=1e-4, atol=1e-6)


def test_a_run_that_waits_for_rollouts_does_not_wait_on(model_path, tmp_path):
    began = []

    def silent():
        if trainer.state.global_step == AT and not began:
            began.append(trainer.state.global_step)
            sigterm()
        return bool(began)

    engine = WaitsAfterSigterm(silent)
    trainer = run(model_path, tmp_path, engine=engine, num_iterations=1, stall_timeout=3600.0)
    with pytest.raises(Terminated):
        trainer.train()
    assert checkpoint.why_invalid(tmp_path / "Terminating" / f"checkpoint-{AT}") is None


def test_without_save_strategy_there_is_no_checkpoint_unless_asked_for(model_path, tmp_path):
    for jit, saved in ((False, []), (True, [f"checkpoint-{AT + 1}"])):
        folder = tmp_path / str(jit)
        trainer = run(model_path, folder, save_strategy="no", enable_jit_checkpoint=jit)
        trainer.moment = "inside a step"
        with pytest.raises(Terminated):
            trainer.train()
        assert [path.name for path in checkpoint.checkpoints(folder / "Terminating")] == saved
        assert trainer.args.enable_jit_checkpoint is jit


def test_a_run_whose_last_step_is_under_way_ends_as_usual(model_path, tmp_path):
    trainer = run(model_path, tmp_path, max_steps=AT + 1)
    trainer.moment = "inside a step"
    assert trainer.train().global_step == AT + 1


def test_ctrl_c_saves_a_checkpoint_that_goes_on_and_a_second_one_ends_the_run_at_once(model_path, tmp_path):
    def interrupted(folder, times):
        trainer = run(model_path, folder)
        trainer.moment = "inside a step"
        trainer.interrupts = times
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return checkpoint.checkpoints(folder / "Terminating")

    (saved,) = interrupted(tmp_path / "once", 1)
    assert saved.name == f"checkpoint-{AT + 1}" and checkpoint.why_invalid(saved) is None
    resumed = run(model_path, tmp_path / "once")
    assert resumed.train(resume_from_checkpoint=True).global_step == STEPS
    assert interrupted(tmp_path / "twice", 2) == []


def test_the_handler_of_the_user_is_called_and_comes_back(model_path, tmp_path):
    heard = []
    mine = lambda number, frame: heard.append(number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    try:
        trainer = run(model_path, tmp_path)
        trainer.moment = "inside a step"
        with pytest.raises(Terminated):
            trainer.train()
        assert heard == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_training_in_a_thread_sets_no_handler(model_path, tmp_path):
    seen = []

    def noted(completion_ids, target, **kwargs):
        seen.append(signal.getsignal(signal.SIGTERM))
        return reward(completion_ids, target)

    trainer = run(model_path, tmp_path, max_steps=2, reward_funcs=noted)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join(240)
    assert not thread.is_alive() and trainer.state.global_step == 2
    assert set(seen) == {signal.SIG_DFL}


def events():
    """A `Termination` that listens, and its events: `call(name, step)` returns the control."""
    ends = Termination(lambda value: value, lambda: True)

    def call(name, step):
        control = TrainerControl(should_evaluate=True)
        getattr(ends, name)(None, TrainerState(global_step=step), control)
        return control

    return ends, call


def test_there_is_something_to_save_after_a_step_that_no_checkpoint_holds():
    ends, call = events()
    with ends.listening():
        call("on_train_begin", 3)  # resumed
        assert [ends.should_save(step) for step in (3, 4)] == [False, True]
        call("on_save", 4)
        assert [ends.should_save(step) for step in (4, 5)] == [False, True]


def test_a_run_does_not_end_inside_an_optimizer_step_and_does_not_evaluate_at_its_end():
    ends, call = events()
    with ends.listening():
        call("on_train_begin", 0)
        call("on_substep_end", 0)
        sigterm()
        with ends.may_interrupt():  # a take inside a step
            ends.raise_if_requested()
        control = call("on_step_end", 1)
        assert control.should_save and not control.should_evaluate
        with pytest.raises(StopRequested), ends.may_interrupt():
            pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_process_forked_during_training_takes_sigterm_as_before():
    ready, readies = os.pipe()
    with Termination(lambda value: value, lambda: True).listening():
        child = os.fork()
        if child == 0:
            os.write(readies, b"!")
            time.sleep(60)
            os._exit(7)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(ready)
    os.close(readies)
    assert status == -signal.SIGTERM


def test_the_sigterm_of_a_launcher_that_comes_twice_is_one(monkeypatch):
    ended = []
    monkeypatch.setattr(termination, "_die", ended.append)
    with Termination(lambda value: value, lambda: True).listening():
        sigterm()
        sigterm()
        assert ended == []
        monkeypatch.setattr(termination, "DUPLICATE_SECONDS", 0.0)
        sigterm()
    assert ended == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("second", [None, signal.SIGTERM, signal.SIGINT])
def test_a_process_exits_with_a_code_of_its_own_and_at_once_with_a_second_signal(model_path, tmp_path, second):
    code = f"""
import sys, time
from pathlib import Path
from tests import test_termination as here
from trl_a3po.session import termination
termination.DUPLICATE_SECONDS = 0.0
folder = Path({str(tmp_path)!r})
def slow(completion_ids, target, trainer_state, **kwargs):
    if trainer_state.global_step:  # there is a step to save
        (folder / "stepped").touch()
    return here.reward(completion_ids, target)
trainer = here.run({model_path!r}, folder, max_steps=10000, reward_funcs=slow, engine="transformers", engine_threads=1)
def hook(*args, save=trainer._save_checkpoint, **kwargs):
    (folder / "saves").touch()
    if {second is not None}:
        time.sleep(3600)
    save(*args, **kwargs)
trainer._save_checkpoint = hook
trainer.args.save_steps = 10000
trainer.train()
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: (tmp_path / "stepped").exists() or process.poll() is not None, timeout=240)
        process.send_signal(signal.SIGTERM)
        if second is not None:
            until(lambda: (tmp_path / "saves").exists() or process.poll() is not None, timeout=240)
            process.send_signal(second)
        _, printed = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (Terminated.exit_code if second is None else -second), printed[-3000:]
    folders = checkpoint.checkpoints(tmp_path / "Terminating")
    assert [checkpoint.why_invalid(folder) for folder in folders] == ([None] if second is None else [])
