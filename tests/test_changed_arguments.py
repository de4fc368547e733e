"""Settings that are changed after a trainer was built: followed, or an error that names them."""

import pytest
from transformers import TrainerCallback

from tests.runs import build, logged


@pytest.fixture(scope="module")
def trainer(model_path, tmp_path_factory):
    trainer = build(model_path, tmp_path_factory.mktemp("changed"), max_steps=1)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("max_completion_length", 12),
        ("beta", 0.1),
        ("schedule", "sync"),
        ("reward_weights", [2.0]),
    ],
)
def test_a_setting_that_was_read_is_refused_with_its_name(trainer, monkeypatch, name, value):
    before = getattr(trainer.args, name)
    monkeypatch.setattr(trainer.args, name, value)
    with pytest.raises(ValueError, match=rf"args.{name} was changed from .*A3POTrainer with {name}="):
        trainer.train()
    monkeypatch.setattr(trainer.args, name, before)
    trainer.train()


def test_a_copy_that_the_loss_reads_is_refused_with_its_name(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "temperature", 0.5)
    with pytest.raises(ValueError, match=r"trainer.temperature was changed from 1.0 to 0.5"):
        trainer.train()


def test_settings_that_are_read_when_they_are_used_are_followed(trainer, monkeypatch):
    for name, value in (("max_steps", 2), ("learning_rate", 0.1), ("behavior_weight_cap", 2.0)):
        monkeypatch.setattr(trainer.args, name, value)
    trainer.train()
    assert len(logged(trainer, "loss")) == 2


class Changes(TrainerCallback):
    def __init__(self, name, value):
        self.name, self.value = name, value

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            setattr(args, self.name, self.value)


@pytest.mark.parametrize("name, value", [("max_staleness", 9), ("weight_sync_steps", 2), ("num_generations", 8)])
def test_a_setting_that_a_callback_changes_during_training_ends_the_run(model_path, tmp_path, name, value):
    trainer = build(model_path, tmp_path, callbacks=[Changes(name, value)])
    with pytest.raises(ValueError, match=rf"args.{name} was changed from .*A3POTrainer with {name}="):
        trainer.train()
    assert trainer.state.global_step == 2
