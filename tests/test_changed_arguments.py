"""Settings that are changed after a trainer was built, between two trainings or in the middle of one: each is
followed, or an error names it."""

from dataclasses import fields

import pytest
from transformers import TrainerCallback, TrainingArguments

from tests.runs import build, logged
from tests.test_settings_matter import CASES, IN_A_RUN, OF_AN_OBJECTIVE
from tests.tiny import tiny_prompts
from trl_a3po import A3POConfig
from trl_a3po.checks.changed_arguments import READ_BY_EACH_LOSS, READ_BY_EACH_TRAINING, settings_read_once
from trl_a3po.config.documentation import setting_rows
from trl_a3po.errors import RewardError

FOLLOWED_AT_ONCE = {*READ_BY_EACH_LOSS, *OF_AN_OBJECTIVE, "behavior_weight_cap", "behavior_weight_mode", "dry_run"}


@pytest.fixture(scope="module")
def trainer(model_path, tmp_path_factory):
    trainer = build(model_path, tmp_path_factory.mktemp("changed"), max_steps=1)
    trainer.train()
    return trainer


def other_value(name: str, value):
    """Some other value of a setting; whether it could be run with does not matter."""
    if name in CASES or name in IN_A_RUN:
        return next(other for other in (CASES | IN_A_RUN)[name][:2] if other != value)
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else ["other"]


def test_every_setting_has_one_time_at_which_it_is_read():
    inherited = {field.name for field in fields(TrainingArguments)}
    ours = {field.name for field in fields(A3POConfig)} - inherited
    once, each_training = set(settings_read_once()), set(READ_BY_EACH_TRAINING)
    assert not once & each_training and not FOLLOWED_AT_ONCE & (once | each_training)
    assert ours <= once | each_training | FOLLOWED_AT_ONCE | {"compare_proximal_every"}
    assert {row.name for row in setting_rows()} <= ours
    # What each training is said to read is what a run is built from.
    assert each_training - {"seed"} <= CASES.keys() | IN_A_RUN.keys()


@pytest.mark.parametrize("name", settings_read_once())
def test_a_setting_that_was_read_is_refused_with_its_name_at_any_time(trainer, monkeypatch, name):
    monkeypatch.setattr(trainer.args, name, other_value(name, getattr(trainer.args, name)))
    for moment in (trainer._settings.check, trainer._settings.begin_training):
        with pytest.raises(ValueError, match=rf"args.{name} was changed from .* build a new A3POTrainer with {name}="):
            moment(trainer)


@pytest.mark.parametrize("name", READ_BY_EACH_TRAINING)
def test_a_setting_that_each_training_reads_is_refused_in_the_middle_of_one(trainer, monkeypatch, name):
    monkeypatch.setattr(trainer.args, name, other_value(name, getattr(trainer.args, name)))
    with pytest.raises(ValueError, match=rf"args.{name} was changed from .* during training.*before the next train"):
        trainer._settings.check(trainer)


@pytest.mark.parametrize("name", ["temperature", "max_completion_length", "num_generations", "num_iterations"])
def test_a_copy_that_the_loss_reads_is_refused_with_its_name(trainer, monkeypatch, name):
    monkeypatch.setattr(trainer, name, getattr(trainer, name) * 2)
    with pytest.raises(ValueError, match=rf"trainer.{name} was changed from .* to "):
        trainer.train()


class After(TrainerCallback):
    """Calls a function after the first step."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.change(args, state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda args, state: setattr(args, "beta", 0.1), r"args\.beta was changed from 0\.0 to 0\.1"),
        (lambda args, state: setattr(args, "max_staleness", 3), r"args\.max_staleness was changed from 0 to 3 during"),
        (lambda args, state: setattr(state, "max_steps", 9), r"state\.max_steps was raised from 4 to 9 during"),
    ],
    ids=["beta", "max_staleness", "max_steps"],
)
def test_what_a_callback_changes_is_refused_in_the_next_micro_step(model_path, tmp_path, change, words):
    trainer = build(model_path, tmp_path, callbacks=[After(change)])
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda trainer: trainer.reward_funcs.__setitem__(0, lambda completions, **kwargs: [0.0] * len(completions)),
        lambda trainer: setattr(trainer, "reward_funcs", [len]),
        lambda trainer: setattr(trainer, "on_group", len),
    ],
    ids=["a reward function", "reward_funcs", "on_group"],
)
def test_functions_that_a_callback_changes_are_refused_in_the_next_micro_step(model_path, tmp_path, change):
    trainer = build(model_path, tmp_path, callbacks=[After(lambda args, state: change(trainer))])
    with pytest.raises(ValueError, match=r"trainer\.(reward_funcs|on_group) was changed during training"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("method", ["log", "save_model", "evaluate"])
def test_methods_of_the_thread_that_trains_are_refused_to_a_reward_function(model_path, tmp_path, method):
    def disturbs(completions, **kwargs):
        calls[method]()
        return [0.0] * len(completions)

    trainer = build(model_path, tmp_path, reward_funcs=disturbs, eval_dataset=tiny_prompts(4))
    calls = {
        "log": lambda: trainer.log({"mine": 1.0}),
        "save_model": lambda: trainer.save_model(str(tmp_path / "saved")),
        "evaluate": trainer.evaluate,
    }
    words = rf"trainer\.{method}\(\) was called beside training, .*log_metric and log_extra\.'\)\.$"
    with pytest.raises(RewardError, match=words):
        trainer.train()
    assert not (tmp_path / "saved").exists()


def test_what_each_loss_reads_and_fewer_steps_are_followed_in_the_middle_of_a_training(model_path, tmp_path):
    def change(args, state):
        args.behavior_weight_cap, args.delta, state.max_steps = 2.0, 3.0, 3

    trainer = build(model_path, tmp_path, callbacks=[After(change)])
    trainer.train()
    assert trainer.state.global_step == 3


def test_settings_that_each_training_reads_are_followed_by_the_next_one(model_path, tmp_path):
    trainer = build(model_path, tmp_path, max_steps=3)
    trainer.train()
    assert max(logged(trainer, "a3po/staleness/max")) == 0 and trainer.args.engine.published == [0, 1, 2]
    args = trainer.args
    args.max_staleness = 1
    args.max_steps, args.learning_rate, args.weight_sync_steps, args.engine_slots = 4, 0.1, 2, 8
    trainer.args.engine.published.clear()
    trainer.train()
    assert trainer.args.engine.published == [0, 2]
    assert max(logged(trainer, "a3po/staleness/max")) == 1


def test_a_setting_that_cannot_be_run_with_is_refused_by_the_next_training(trainer, monkeypatch):
    monkeypatch.setattr(trainer.args, "weight_sync_steps", 9)
    with pytest.raises(ValueError, match="weight_sync_steps"):
        trainer.train()
