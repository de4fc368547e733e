"""An engine that is not the policy any more: noticed in a run by the gap of log-probs, and only then."""

import logging

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.runs import build, logged
from tests.tiny import tiny_tokenizer
from trl_a3po.errors import DeliveryError
from trl_a3po.publish import fingerprint
from trl_a3po.publish.gap_watch import PATIENCE
from trl_a3po.session.engine_gap import MIN_TOKENS, EngineGapOfRun

pytestmark = pytest.mark.long

BIG_BATCH = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}  # more tokens than are needed


class Once(TrainerCallback):
    """Calls a function with the model after the second step."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                self.change(model)


def slower_rotation(model):
    model.model.rotary_emb.inv_freq *= 0.5


def larger_scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.2


def few_elements(model):
    model.model.embed_tokens.weight.data[:, ::8][20:24] += 2.0


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "does not sample from the policy" in record.message]


def frozen_embeddings(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, tie_word_embeddings=False)
    model.model.embed_tokens.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("change", "words"), [(slower_rotation, r"'model\.rotary_emb\.inv_freq'"), (larger_scale, "an attribute")]
)
def test_what_the_engine_does_not_have_is_a_warning_and_then_an_error(model_path, tmp_path, caplog, change, words):
    trainer = build(model_path, tmp_path, callbacks=[Once(change)], max_steps=20, **BIG_BATCH)
    with caplog.at_level(logging.WARNING, logger="trl_a3po"), pytest.raises(DeliveryError, match=words):
        trainer.train()
    assert len(warnings(caplog)) == 1
    assert trainer.state.global_step == 2 + PATIENCE


def test_the_delivery_check_watches_the_gap_where_no_batch_is_fresh(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, callbacks=[Once(slower_rotation)], max_steps=30, max_staleness=4,
        schedule="fixed_lag", delivery_check_steps=4, **BIG_BATCH,
    )  # fmt: skip
    with pytest.raises(DeliveryError, match="probe tokens"):
        trainer.train()
    assert trainer.state.global_step < 12  # once it is unusual, every publish is checked


@pytest.mark.parametrize("change", [slower_rotation, larger_scale])
def test_a_model_that_is_not_what_its_configuration_says_is_noticed_from_the_start(model_path, tmp_path, change):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    change(model)
    trainer = build(model, tmp_path, processing_class=tiny_tokenizer(), max_steps=20, **BIG_BATCH)
    with pytest.raises(DeliveryError, match="not sample from the policy"):
        trainer.train()
    assert trainer.state.global_step == PATIENCE


def test_every_weight_is_sent_once_more_when_the_gap_is_unusual(model_path, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(fingerprint, "SAMPLES", 2)  # of a small model, all elements would be seen
    trainer = build(
        frozen_embeddings(model_path), tmp_path, callbacks=[Once(few_elements)], max_steps=9,
        processing_class=tiny_tokenizer(), learning_rate=0.0, **BIG_BATCH,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="trl_a3po"):
        trainer.train()
    gaps = logged(trainer, "a3po/engine_gap/mean")
    assert len(gaps) == 9
    assert gaps[2] > 0.005 and max(gaps[:2] + gaps[3:]) < 1e-4
    assert len(warnings(caplog)) == 1


def test_a_gap_that_is_meant_is_accepted(model_path, tmp_path):
    trainer = build(model_path, tmp_path, callbacks=[Once(larger_scale)], max_steps=9, max_engine_gap=5.0, **BIG_BATCH)
    trainer.train()
    assert max(logged(trainer, "a3po/engine_gap/mean")) > 0.02


def test_noise_in_the_training_forward_is_not_taken_for_a_wrong_engine(model_path, tmp_path):
    lora = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear")
    trainer = build(
        model_path, tmp_path, peft_config=lora, learning_rate=2.0, max_steps=12, delivery_check_steps=1, **BIG_BATCH
    )
    trainer.train()
    assert max(logged(trainer, "a3po/engine_gap/mean")) > 0.02


def test_bfloat16_raises_no_alarm_while_the_policy_moves_far(model_path, tmp_path, caplog):
    trainer = build(
        model_path, tmp_path, engine_dtype="bfloat16", max_steps=40, learning_rate=1.0, max_staleness=0,
        delivery_check_steps=1, num_train_epochs=50, **BIG_BATCH,
    )  # fmt: skip
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    with caplog.at_level(logging.WARNING, logger="trl_a3po"):
        trainer.train()
    moved = [(a - b).norm() / b.norm() for a, b in zip(trainer.model.parameters(), before, strict=True)]
    assert max(moved) > 0.3
    assert max(logged(trainer, "a3po/engine_gap/mean")) > 1e-3 and warnings(caplog) == []


@pytest.fixture
def gaps(model_path, tmp_path):
    trainer = build(model_path, tmp_path)
    return EngineGapOfRun(trainer.args, trainer.model, "no")


def mean_of(gap, tokens=MIN_TOKENS):
    return [(gap * tokens, tokens)]


def test_every_weight_is_asked_for_once_for_each_time_that_the_gap_stops_to_be_normal(gaps):
    asked = []
    for gap in (1e-5, 0.07, 0.07, 1e-5, 0.07):
        gaps.see(mean_of(gap))
        asked.append(gaps.asks_for_all_weights())
    assert asked == [False, True, False, False, True]
    gaps.see(mean_of(1e-5))
    assert not gaps.asks_for_all_weights()
    gaps.probed(False)
    assert gaps.asks_for_all_weights() and not gaps.asks_for_all_weights()


def test_few_tokens_are_judged_together_with_those_of_the_next_batch(gaps):
    gaps.see(mean_of(1e-5))
    gaps.see(mean_of(0.07, MIN_TOKENS - 1))  # alone, they would be unusual
    assert not gaps.asks_for_all_weights()
    gaps.see(mean_of(0.0, 63 * MIN_TOKENS))
    assert not gaps.asks_for_all_weights()
