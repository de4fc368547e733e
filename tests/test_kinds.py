"""Settings of TRL and transformers whose values are of another kind than their annotation: refused by name."""

import math
import re

import numpy as np
import pytest
import torch
from trl import GRPOConfig, ModelConfig

from tests.runs import build
from tests.test_cli import refused
from trl_a3po import A3POConfig
from trl_a3po.cli.train import parse_command
from trl_a3po.config.check_kinds import COUNTS, FILES, MAY_BE_INFINITE, NEVER_NONE, check_kinds

FRACTIONS = [
    "max_steps",
    "num_generations",
    "seed",
    "per_device_train_batch_size",
    "save_total_limit",
    "num_iterations",
]
REAL = ["learning_rate", "num_train_epochs", "beta", "top_p", "weight_decay", "max_grad_norm", "epsilon", "eval_steps"]
NOT_NUMBERS = [(name, value) for name in FRACTIONS for value in (2.5, math.inf, math.nan, True, [2], "2")]
NOT_NUMBERS += [(name, value) for name in REAL for value in (math.nan, True, [0.5], "0.5")]
NOT_NUMBERS += [(name, math.inf) for name in REAL if name not in MAY_BE_INFINITE]
NOT_NUMBERS += [("max_steps", None), ("learning_rate", None)]
NOT_NUMBERS += [("reward_weights", [1.0, math.nan]), ("reward_weights", [True])]


@pytest.mark.parametrize(("name", "value"), NOT_NUMBERS, ids=[f"{name}={value!r}" for name, value in NOT_NUMBERS])
def test_a_number_of_another_kind_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(value))} must be a (whole |finite )?number\.$"):
        A3POConfig(use_cpu=True, **{name: value})


def test_numbers_of_the_right_kind_are_kept():
    kept = {"max_steps": np.int64(3), "learning_rate": np.float32(0.5), "warmup_steps": 0.1, "save_steps": 0.5}
    kept |= {"logging_steps": 5, "reward_weights": [1, 0.5], "eval_steps": None, "eval_delay": None}
    kept |= {"weight_decay": torch.tensor(0.5), "dataloader_num_workers": False}
    kept |= dict.fromkeys(set(MAY_BE_INFINITE) - kept.keys(), math.inf)
    args = A3POConfig(use_cpu=True, **kept)
    assert {name: getattr(args, name) for name in kept} == kept


def test_a_number_that_counts_may_be_written_as_a_float():
    args = A3POConfig(use_cpu=True, max_steps=1e3, save_total_limit=2.0)
    assert repr(args.max_steps) == "1000" and repr(args.save_total_limit) == "2"


def test_numbers_of_numpy_are_numbers_for_settings_of_ours_too():
    args = A3POConfig(use_cpu=True, max_staleness=np.int64(2), reward_timeout=np.int64(3), temperature=np.float32(0.5))
    assert [repr(value) for value in (args.max_staleness, args.reward_timeout, args.temperature)] == ["2", "3", "0.5"]


@pytest.mark.parametrize("name", NEVER_NONE)
def test_numbers_that_training_needs_are_not_none(name):
    with pytest.raises(ValueError, match=rf"^{name}=None must be a (whole )?number\.$"):
        A3POConfig(use_cpu=True, **{name: None})


def test_filters_of_sampling_may_be_none(model_path, tmp_path):
    trainer = build(model_path, tmp_path, max_steps=1, top_p=None, repetition_penalty=None)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_counted_is_at_least_one(name):
    with pytest.raises(ValueError, match=f"^{name}=0 must be at least 1"):
        A3POConfig(use_cpu=True, **{name: 0})


@pytest.mark.parametrize(
    "name, value", [("reward_weights", 1.0), ("generation_kwargs", 5), ("model_init_kwargs", 2.0)]
)
def test_a_number_is_neither_a_list_nor_a_dictionary(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value!r} (must be a list|is not a dictionary)"):
        A3POConfig(use_cpu=True, **{name: value})


@pytest.mark.parametrize("value", [True, False])
def test_a_flag_in_place_of_text_is_as_in_grpo(value):
    settings = {"use_cpu": True, "scale_rewards": value}
    assert A3POConfig(**settings).scale_rewards == GRPOConfig(**settings).scale_rewards


@pytest.mark.parametrize("name", ["eval_strategy", "save_strategy", "logging_strategy"])
def test_an_unquoted_no_of_yaml_is_no(name):
    assert getattr(A3POConfig(use_cpu=True, **{name: False}), name) == "no"


@pytest.mark.parametrize("value", ["{'bad", "{bad", '{"top_k": 5', '{"top_k"}', "bad", "", "nowhere.json"])
@pytest.mark.parametrize("name", ["generation_kwargs", "model_init_kwargs", "lr_scheduler_kwargs", "fsdp_config"])
def test_text_that_is_no_dictionary_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(value))} is ") as error:
        A3POConfig(use_cpu=True, **{name: value})
    words = "is not JSON (" if value.startswith("{") else "is neither a " if name in FILES else "is not a dictionary"
    assert words in str(error.value) and str(error.value).count(". ") == 0


@pytest.mark.parametrize("value", [{"top_k": 5}, '{"top_k": 5}'])
def test_a_dictionary_may_be_written_as_json(value):
    assert A3POConfig(use_cpu=True, generation_kwargs=value).generation_kwargs == {"top_k": 5}


@pytest.mark.parametrize(("name", "value"), [("lora_r", 8.5), ("lora_dropout", math.nan)])
def test_the_numbers_of_the_model_are_checked_too(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value!r} must be"):
        check_kinds(ModelConfig(**{name: value}))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("max_steps: 2.5", "max_steps=2.5 must be a whole number."),
        ("learning_rate: nan", "learning_rate=nan must be a finite number."),
        ("learning_rate: null", "learning_rate=None must be a number."),
        ("learning_rate: .inf", "learning_rate=inf must be a finite number."),
        ("lora_r: 8.5", "lora_r=8.5 must be a whole number."),
        ("generation_kwargs: '{bad'", "generation_kwargs='{bad' is not JSON ("),
    ],
)
def test_a_recipe_is_refused_by_the_name_of_its_setting(tmp_path, line, words):
    (tmp_path / "recipe.yaml").write_text(f"use_cpu: true\n{line}\n")
    assert words in refused("train", tmp_path / "recipe.yaml")


def test_a_number_of_a_recipe_may_be_one_that_yaml_reads_as_text(tmp_path):
    (tmp_path / "recipe.yaml").write_text("use_cpu: true\nlearning_rate: 1e-6\n")
    assert parse_command([str(tmp_path / "recipe.yaml")])[1].learning_rate == 1e-6


@pytest.mark.parametrize("option", ["--generation_kwargs", "--model-init-kwargs"])
def test_an_option_in_json_is_refused_by_its_name(option):
    name = option.strip("-").replace("-", "_")
    assert f'{name}="{{\'bad" is not JSON (' in refused("train", "--use_cpu", "true", option, "{'bad")
