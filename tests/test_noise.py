"""Noise in the training forward, which the engine does not have, is named when a trainer is built."""

import logging

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.runs import build
from tests.tiny import tiny_config
from trl_a3po import A3POConfig
from trl_a3po.checks.noise import noise


def lora(dropout: float) -> LoraConfig:
    return LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj"])


def sources(model, **settings) -> list[str]:
    return [source for source, _ in noise(A3POConfig("run", use_cpu=True, **settings), model)]


def test_a_model_without_noise_has_no_source_of_it():
    assert sources(get_peft_model(AutoModelForCausalLM.from_config(tiny_config()), lora(0.0))) == []


def test_each_source_of_noise_is_found_with_its_size():
    model = AutoModelForCausalLM.from_config(tiny_config(attention_dropout=0.1))
    assert sources(get_peft_model(model, lora(0.05)), neftune_noise_alpha=5.0) == [
        "lora_dropout=0.05 in 2 layers",
        "attention_dropout=0.1",
        "neftune_noise_alpha=5",
    ]


@pytest.mark.parametrize(
    ("dropout", "disable", "warned"), [(0.05, False, True), (0.05, True, False), (0.0, False, False)]
)
def test_a_trainer_warns_of_noise_that_it_will_train_with(model_path, tmp_path, caplog, dropout, disable, warned):
    with caplog.at_level(logging.WARNING, logger="trl_a3po"):
        build(model_path, tmp_path, peft_config=lora(dropout), disable_dropout=disable)
    said = [record.getMessage() for record in caplog.records if "training forward is random" in record.getMessage()]
    assert len(said) == warned
    assert all("lora_dropout=0.05 in 2 layers" in text and "set lora_dropout=0." in text for text in said)
