"""Checkpoints that a callback asks for at any moment: exactly resumed, or refused with what to do instead."""

from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from tests.runs import TakeRecorder, build
from tests.tiny import tiny_prompts
from trl_a3po.checkpoints import checkpoint

pytestmark = pytest.mark.long

STEPS = 6
# Every generation batch is trained for three optimizer steps of two micro-steps each.
SETTINGS = {
    "gradient_accumulation_steps": 2, "num_iterations": 3, "max_steps": STEPS, "eval_strategy": "steps",
    "eval_steps": 1, "per_device_eval_batch_size": 4,
}  # fmt: skip
LONG = ("on_optimizer_step", "on_log", "on_evaluate")
BY_CONTROL = (
    "on_step_begin",
    "on_substep_end",
    "on_step_end",
    *(pytest.param(event, marks=pytest.mark.long) for event in LONG),
)
BY_HAND = ("on_step_begin", "on_step_end", *(pytest.param(event, marks=pytest.mark.long) for event in LONG[1:]))
REFUSED = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")


def saves_in(event: str, save) -> TrainerCallback:
    """A callback that calls `save(control)` in `event` of optimizer step 2 or later, once."""
    called = []

    def at_event(self, args, state, control, **kwargs):
        if state.global_step >= 2 and not called:
            called.append(state.global_step)
            save(control)

    return type("Saves", (TrainerCallback,), {event: at_event})()


def run(model_path, folder, callbacks=(), resume=None, **settings) -> TakeRecorder:
    trainer = build(
        model_path, folder, TakeRecorder, callbacks=list(callbacks), eval_dataset=tiny_prompts(4),
        **{**SETTINGS, **settings},
    )  # fmt: skip
    for callback in callbacks:
        callback.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer


PERIODIC = pytest.param({"schedule": "periodic", "num_iterations": 1}, marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[{}, PERIODIC], ids=["", "periodic"])
def whole(request, model_path, tmp_path_factory):
    trainer = run(model_path, tmp_path_factory.mktemp("whole"), **request.param)
    weights = [weight.detach().clone() for weight in trainer.model.parameters()]
    return trainer.takes, weights, request.param


def assert_resumes_exactly(whole, model_path, folder):
    takes, weights, settings = whole
    (saved,) = checkpoint.checkpoints(Path(folder) / "TakeRecorder")
    assert checkpoint.why_invalid(saved) is None
    resumed = run(model_path, folder, resume=True, **settings)
    prompts = [[group.prompt.index for group in groups] for version, groups in takes if version >= resumed.takes[0][0]]
    assert [[group.prompt.index for group in groups] for _, groups in resumed.takes] == prompts
    for mine, theirs in zip(resumed.model.parameters(), weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def set_should_save(control):
    control.should_save = True


@pytest.mark.parametrize("event", BY_CONTROL)
def test_a_run_resumes_from_what_a_callback_asked_for(whole, model_path, tmp_path, event):
    run(model_path, tmp_path, [saves_in(event, set_should_save)], **whole[2])
    assert_resumes_exactly(whole, model_path, tmp_path)


@pytest.mark.parametrize("event", BY_HAND)
def test_a_run_resumes_from_what_was_saved_by_hand(whole, model_path, tmp_path, event):
    callback = saves_in(event, lambda _: callback.trainer._save_checkpoint(callback.trainer.model, None))
    run(model_path, tmp_path, [callback], **whole[2])
    assert_resumes_exactly(whole, model_path, tmp_path)


@pytest.mark.parametrize("event", REFUSED)
def test_inside_an_optimizer_step_saving_by_hand_is_refused(model_path, tmp_path, event):
    callback = saves_in(event, lambda _: callback.trainer._save_checkpoint(callback.trainer.model, None))
    with pytest.raises(RuntimeError, match=r"inside optimizer step 3.*control\.should_save=True"):
        run(model_path, tmp_path, [callback])
    assert checkpoint.checkpoints(tmp_path / "TakeRecorder") == []


def test_between_resuming_and_the_first_micro_step_saving_by_hand_is_refused(model_path, tmp_path):
    run(model_path, tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    callback = saves_in("on_step_begin", lambda _: callback.trainer._save_checkpoint(callback.trainer.model, None))
    with pytest.raises(RuntimeError, match="at the resumed step 4"):
        run(model_path, tmp_path, [callback], resume=True, save_strategy="steps")
    assert checkpoint.why_invalid(tmp_path / "TakeRecorder" / "checkpoint-4") is None


def test_a_model_may_be_saved_at_any_moment(whole, model_path, tmp_path):
    callback = saves_in("on_substep_end", lambda _: callback.trainer.save_model(str(tmp_path / "model")))
    trainer = run(model_path, tmp_path, [callback], **whole[2])
    assert (tmp_path / "model" / "model.safetensors").is_file()
    for mine, theirs in zip(trainer.model.parameters(), whole[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
