"""A prompt is tokenised once: a chat template that gives other tokens on another day changes nothing."""

import datetime

import pytest
import transformers.utils.chat_template_utils as chat_templates
from datasets import Dataset
from transformers import TrainerCallback

from tests.runs import TakeRecorder, build
from tests.tiny import tiny_tokenizer

TEMPLATE = "{{ 'w' ~ (strftime_now('%d') | int) }}{% for m in messages %} {{ m['content'] }}{% endfor %} "


class Clock(datetime.datetime):
    today = datetime.datetime(2026, 11, 28, 23, 59)

    @classmethod
    def now(cls, tz=None):
        return cls.today


class Midnight(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            Clock.today = datetime.datetime(2026, 11, 29, 0, 1)


@pytest.fixture
def dated(model_path, tmp_path, monkeypatch):
    """A function that makes a trainer whose prompts begin with the day of the month."""
    monkeypatch.setattr(chat_templates, "datetime", Clock)
    monkeypatch.setattr(Clock, "today", Clock.today)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    rows = [{"prompt": [{"role": "user", "content": f"w{i} w{i + 1}"}], "target": i} for i in range(32)]
    data = Dataset.from_list(rows)

    def make(**settings):
        settings = {"max_staleness": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 8, **settings}
        return build(model_path, tmp_path, TakeRecorder, train_dataset=data, processing_class=tokenizer, **settings)

    return make


def days(trainer):
    return [group.prompt.token_ids[0] - 3 for _, group in trainer.groups]


def test_a_run_goes_on_after_midnight_and_resumes_the_day_after(dated):
    whole = dated(callbacks=[Midnight()])
    whole.train()
    assert set(days(whole)) == {28, 29} and whole.state.global_step == 8
    resumed = dated()
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-1")
    outstanding = [day for day in days(resumed) if day == 28]
    assert outstanding and resumed.state.global_step == 8


def test_an_evaluation_goes_on_after_midnight(dated, monkeypatch):
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"w{i}"}], "target": i} for i in range(2)])
    trainer = dated(eval_dataset=data, eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=4)
    prepare = trainer._sample_evaluation

    def at_midnight(rows):
        prepared = prepare(rows)
        Clock.today = datetime.datetime(2026, 11, 29, 0, 1)
        return prepared

    monkeypatch.setattr(trainer, "_sample_evaluation", at_midnight)
    trainer.train()
    assert trainer.state.global_step == 8
