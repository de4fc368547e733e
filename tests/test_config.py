"""What `A3POConfig` keeps, changes and refuses."""

import math
import os
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from trl import GRPOConfig

from trl_a3po import A3POConfig
from trl_a3po.config.annotations import annotations
from trl_a3po.config.documentation import setting_rows


def config(**settings):
    base = {"output_dir": "unused", "per_device_train_batch_size": 4, "num_generations": 4, "report_to": "none"}
    return A3POConfig(**{**base, "use_cpu": True, **settings})


def test_defaults():
    args = config()
    assert (args.max_staleness, args.schedule, args.objective) == (4, "async", "decoupled")
    assert (args.proximal_method, args.fresh_proximal) == ("loglinear", "behavior")
    assert (args.behavior_weight_cap, args.behavior_weight_mode) == (5.0, "truncate")
    assert (args.kv_on_publish, args.lora_sync, args.reward_workers, args.weight_sync_steps) == (
        "keep",
        "adapter",
        0,
        1,
    )


def test_only_two_defaults_differ_from_grpo():
    theirs, ours = GRPOConfig.__dataclass_fields__, A3POConfig.__dataclass_fields__
    changed = {name for name, field in theirs.items() if field.default != ours[name].default}
    assert changed == {"use_bias_correction_kl"}
    assert (
        config().bf16 is False
    )  # the default of the field is None in both; without an accelerator it resolves to off


def test_bf16_can_be_asked_for_on_a_cpu():
    assert config(bf16=True).bf16 is True


def test_every_field_has_a_help_text():
    assert [
        setting.name for setting in fields(A3POConfig) if setting.name in OWN and not setting.metadata["help"]
    ] == []


def test_the_sync_schedule_has_no_staleness_to_spend():
    assert config(schedule="sync").staleness_bound == 0
    assert config(max_staleness=3).staleness_bound == 3


@pytest.mark.parametrize(
    "settings, steps",
    [
        ({}, 1),
        ({"gradient_accumulation_steps": 4}, 1),
        ({"num_iterations": 2}, 2),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, 2),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 4}, 1),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 2),
    ],
)
def test_optimizer_steps_per_generation(settings, steps):
    assert config(**settings).optimizer_steps_per_generation == steps


def test_trls_server_fields_name_the_engine():
    args = config(use_vllm=True, vllm_mode="server", vllm_server_host="10.0.0.7", vllm_server_port=8123)
    assert (args.engine, args.vllm_server_urls, args.use_vllm) == ("vllm", ["http://10.0.0.7:8123"], False)
    args = config(use_vllm=True, vllm_mode="server", vllm_server_base_url="https://here/one")
    assert args.vllm_server_urls == ["https://here/one"]


def test_one_server_needs_no_list():
    args = A3POConfig("run", engine="vllm", vllm_server_urls="http://here:8000")
    assert args.vllm_server_urls == ["http://here:8000"]


def test_trls_colocated_vllm_is_vllm_in_a_process_on_the_gpus_that_train(monkeypatch):
    args = config(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.4)
    assert (args.engine, args.vllm_server_urls, args.engine_device, args.use_vllm) == ("vllm", None, None, False)


REFUSED = [
    ({"schedule": "eager"}, "schedule='eager' is not known: set one of 'async', 'sync', 'periodic', 'fixed_lag'."),
    ({"schedule": "fixed_lag", "num_iterations": 2, "max_staleness": 3}, "multiple of 2"),
    ({"schedule": "fixed_lag", "weight_sync_steps": 2, "max_staleness": 2}, "weight_sync_steps=1"),
    ({"schedule": "fixed_lag", "gradient_accumulation_steps": 2, "steps_per_generation": 3}, "whole optimizer steps"),
    ({"objective": "ppo"}, "objective='ppo' is not known"),
    ({"proximal_method": "logliner"}, "proximal_method='logliner' is not known"),
    ({"fresh_proximal": "theta"}, "fresh_proximal='theta' is not known"),
    ({"behavior_weight_mode": "clamp"}, "behavior_weight_mode='clamp' is not known"),
    ({"kv_on_publish": "drop"}, "kv_on_publish='drop' is not known"),
    ({"engine": "sglang"}, "engine='sglang' is not known"),
    ({"engine": "vllm", "deterministic": True, "engine_max_prompt_tokens": 8}, "deterministic=True cannot hold"),
    ({"engine": "vllm", "vllm_server_urls": ["localhost:8000"]}, "'localhost:8000': set URLs such as"),
    ({"engine": "vllm", "vllm_server_urls": ["http://a:1"], "engine_slots": 4}, "--max-num-seqs 4"),
    ({"engine": "vllm", "vllm_server_urls": ["http://a:1", "http://a:1/v1"]}, "names http://a:1 twice"),
    ({"engine": "vllm", "vllm_server_urls": ["http://me:secret@a:1"]}, "set the environment variable VLLM_API_KEY"),
    ({"vllm_server_urls": ["http://a:1"]}, "set engine='vllm'"),
    ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2 has no effect with engine='transformers'"),
    ({"engine": "vllm", "vllm_tensor_parallel_size": 2}, "set engine_device to them, such as ['cuda:0', 'cuda:1']"),
    (
        {"engine": "vllm", "vllm_tensor_parallel_size": 2, "engine_device": ["cpu", "cpu"]},
        "names the CPU, over which no",
    ),
    (
        {"engine": "vllm", "vllm_python": "/no/such/python"},
        "vllm_python='/no/such/python' is no program",
    ),
    ({"engine": "vllm", "vllm_tensor_parallel_size": 0}, "vllm_tensor_parallel_size=0 must be a whole number"),
    (
        {"engine": "vllm", "vllm_server_urls": ["http://a:1"], "vllm_tensor_parallel_size": 2},
        "start the servers with --gpu-memory-utilization, --max-model-len, --model-impl or --tensor-parallel-size",
    ),
    ({"engine": "vllm", "vllm_structured_outputs_regex": "a+"}, "completions are not constrained"),
    ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex='a+' has no effect here"),
    ({"cache_implementation": "static"}, "cache_implementation='static' has no effect here: leave it at None"),
    ({"vllm_importance_sampling_correction": False}, "behavior_weight_mode"),
    ({"vllm_importance_sampling_mode": "token_mask"}, "importance_sampling_level"),
    ({"vllm_importance_sampling_clip_max": 1.5}, "set behavior_weight_cap"),
    ({"vllm_importance_sampling_clip_min": 0.5}, "vllm_importance_sampling_clip_min=0.5"),
    ({"vllm_group_port": 1234}, "vllm_weight_transfer"),
    ({"vllm_max_model_length": 77}, "vllm_max_model_length=77 has no effect with engine='transformers'"),
    ({"vllm_server_port": 8123}, "or set engine='vllm'"),
    ({"engine": "vllm", "vllm_server_port": 8123}, "set vllm_server_urls=['http://0.0.0.0:8123']"),
    (
        {"engine": "vllm", "vllm_server_urls": ["http://a:1"], "vllm_gpu_memory_utilization": 0.5},
        "start the servers with --gpu-memory-utilization",
    ),
    ({"vllm_weight_transfer": "rdma"}, "vllm_weight_transfer='rdma' is not known"),
    ({"vllm_outage_timeout": 0.0}, "vllm_outage_timeout=0.0 must be"),
    ({"engine_dtype": "fp8"}, "engine_dtype='fp8' is not known"),
    ({"engine": "vllm", "vllm_weights_dir": "there"}, "no effect without vllm_server_urls"),
    ({"engine": "vllm", "vllm_weight_transfer": "disk"}, "no effect without vllm_server_urls"),
    ({"engine": "vllm", "vllm_outage_timeout": 5.0}, "no effect without vllm_server_urls"),
    ({"engine": "vllm", "vllm_server_urls": ["http://a:1"], "vllm_model_impl": "transformers"}, "--model-impl"),
    ({"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}, "samples while the trainer trains"),
    ({"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, "engine_device=None does not name"),
    ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
    ({"max_staleness": -1}, "max_staleness=-1 must be a whole number of at least 0"),
    ({"max_staleness": 1.5}, "max_staleness=1.5"),
    ({"weight_sync_steps": 0}, "weight_sync_steps=0"),
    ({"engine_slots": 0}, "engine_slots=0"),
    ({"reward_workers": -1}, "reward_workers=-1"),
    ({"reward_timeout": 0}, "reward_timeout=0"),
    ({"reward_on_timeout": 0.0, "reward_workers": 1}, "without a reward_timeout"),
    ({"reward_on_timeout": 0.0, "reward_timeout": 5.0}, "with reward_workers=0"),
    ({"reward_on_timeout": math.nan, "reward_timeout": 5.0, "reward_workers": 1}, "reward_on_timeout=nan"),
    ({"max_rejected_groups_in_a_row": 0}, "max_rejected_groups_in_a_row=0"),
    ({"stall_timeout": -1.0}, "stall_timeout=-1.0"),
    ({"save_on_each_node": True}, "set save_on_each_node=False, and output_dir to a folder that they share"),
    ({"behavior_weight_cap": 1.0}, "behavior_weight_cap=1.0"),
    ({"spo_negative_scale": 1.5}, "spo_negative_scale=1.5"),
    ({"temperature": 0.0}, "temperature=0.0"),
    ({"loss_type": "cispo"}, "loss_type='cispo'"),
    ({"loss_type": "vespo"}, "loss_type='vespo'"),
    ({"delta": 4.0}, "delta=4.0"),
    ({"proximal_method": "reuse", "num_iterations": 2}, "proximal_method='reuse' with 2 optimizer steps"),
    ({"fresh_proximal": "policy", "num_iterations": 2}, "fresh_proximal='policy' with 2"),
    ({"weight_sync_steps": 6}, "can never fill a batch"),
    ({"weight_sync_steps": 2, "schedule": "sync"}, "can never fill a batch"),
    ({"objective": "asympo", "scale_rewards": "none"}, "set loss_type='grpo'"),
    ({"compare_proximal_every": -1}, "compare_proximal_every=-1"),
    ({"compare_proximal_every": 2, "proximal_method": "behavior"}, "proximal_method='behavior' does not use"),
    ({"compare_proximal_every": 2, "schedule": "periodic"}, "nothing to compare"),
    ({"masked_is_lower": 1.0}, "masked_is_lower=1.0"),
    ({"masked_is_upper": 1.0}, "masked_is_upper=1.0"),
    ({"aipo_cap": math.inf}, "aipo_cap=inf"),
    ({"m2po_threshold": 0.0}, "m2po_threshold=0.0"),
    ({"objective": "masked_is"}, "set proximal_method='reuse' or 'recompute'"),
    ({"objective": "masked_is", "proximal_method": "reuse", "num_iterations": 2}, "or choose another proximal_method"),
    ({"objective": "aipo", "behavior_weight_cap": 2.0}, "behavior_weight_cap=2.0 is not used by objective='aipo'"),
    ({"objective": "m2po", "proximal_method": "recompute"}, "or set objective='decoupled' or 'masked_is'"),
    ({"m2po_threshold": 0.1}, "m2po_threshold=0.1 is not used by objective='decoupled'"),
    ({"objective": "aipo", "loss_type": "cispo"}, "which loss_type='cispo' breaks"),
    ({"objective": "m2po", "importance_sampling_level": "sequence"}, "set importance_sampling_level='token'"),
    ({"objective": "aipo", "delta": 4.0}, "delta=4.0"),
    ({"objective": "m2po", "schedule": "periodic"}, "which schedule='periodic' breaks"),
    ({"objective": "spo", "loss_type": "grpo"}, "set scale_rewards='none'"),
    (
        {"objective": "spo", "loss_type": "grpo", "scale_rewards": "none", "mask_truncated_completions": True},
        "set mask_truncated_completions=False",
    ),
]


@pytest.mark.parametrize("settings, message", REFUSED, ids=[str(case) for case, _ in REFUSED])
def test_refused_with_what_to_set_instead(settings, message):
    with pytest.raises(ValueError) as error:
        config(**settings)
    assert message in str(error.value)
    assert "set" in str(error.value) or "must" in str(error.value) or "leave" in str(error.value).lower()


OWN = {field.name for field in fields(A3POConfig)} - {field.name for field in fields(GRPOConfig)}


ANNOTATIONS = list(annotations())
WHOLE = [(known.name, known.optional) for known in ANNOTATIONS if known.type is int]
REAL = [(known.name, known.optional) for known in ANNOTATIONS if known.type is float]
WRONG = [(name, value) for name, _ in WHOLE for value in ("5", 1.0, True, [1])]
WRONG += [(name, value) for name, _ in REAL for value in ("5", True, math.nan, [1.0])]
WRONG += [(name, None) for name, optional in WHOLE + REAL if not optional]
WRONG += [("max_completion_length", value) for value in (None, 0, "8", 8.5)]
WRONG += [("temperature", value) for value in (None, "1", True)] + [("stall_timeout", math.inf)]


def test_there_are_numeric_settings_of_both_kinds():
    assert len(WHOLE) >= 10 and len(REAL) >= 6


@pytest.mark.parametrize("name, value", WRONG, ids=[f"{name}={value!r}" for name, value in WRONG])
def test_a_numeric_setting_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))} "):
        config(**{name: value})


FLAGS = [known.name for known in ANNOTATIONS if known.type is bool]
TEXTS = ("vllm_weights_dir", "vllm_python")
LISTS = ("engine_device", "vllm_server_urls")
MISTYPED = [(name, value) for name in FLAGS for value in ("False", "no", None, 0, 1, "", [])]
MISTYPED += [(name, value) for name in TEXTS for value in (-1, True, "", ["a"], Path("a"))]
MISTYPED += [(name, value) for name in LISTS for value in (0, 1.5, True, -1, "", [], {}, [0], [None], [""], ("a",))]


def test_the_docstring_describes_every_setting_with_the_help_of_its_field():
    described = re.sub(r"\s+", " ", A3POConfig.__doc__)
    for row in setting_rows():
        assert f"{row.name} (`{row.type}`, *optional*" in described and re.sub(r"\s+", " ", row.help) in described


def test_the_flags_texts_and_lists_are_known():
    """Every other setting is a number, or has a list of choices."""
    assert {known.name for known in ANNOTATIONS} == OWN
    assert set(FLAGS) == {
        "deterministic",
        "drop_zero_variance_groups",
        "dry_run",
        "environment_processes",
        "log_all_metrics",
    }
    choices = {known.name for known in ANNOTATIONS if known.choices}
    others = OWN - {*FLAGS, *TEXTS, *LISTS, *choices, *(name for name, _ in WHOLE + REAL)}
    assert others == {"engine", "objective"}


@pytest.mark.parametrize("name, value", MISTYPED, ids=[f"{name}={value!r}" for name, value in MISTYPED])
def test_a_setting_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(value))} must be ") as error:
        config(engine="vllm", **{name: value})
    assert str(error.value).count(". ") == 0  # one sentence


@pytest.mark.parametrize("name", ["output_dir", *TEXTS])
def test_a_path_may_begin_with_the_home_folder_and_is_whole(name, tmp_path, monkeypatch):
    """Every text among the settings is a path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    there = {} if name == "vllm_python" else {"vllm_server_urls": ["http://a"]}
    for given in ("~/venv/bin/python", "venv/bin/python", str(python)):
        assert getattr(config(engine="vllm", **there, **{name: given}), name) == str(python)


def test_an_interpreter_without_a_folder_is_looked_up_in_path():
    assert config(engine="vllm", vllm_python="python3").vllm_python == "python3"


def test_the_number_of_a_device_is_answered_with_its_name():
    with pytest.raises(ValueError, match="engine_device=1 must be the name of a device, such as 'cuda:1'"):
        config(engine_device=1)


def test_settings_of_the_right_type_are_kept():
    args = config(
        engine="vllm", deterministic=False, dry_run=True, drop_zero_variance_groups=True, engine_device=["cpu"],
        vllm_server_urls=["http://a"], vllm_weights_dir="weights", vllm_python="python3",
    )  # fmt: skip
    assert (args.deterministic, args.dry_run, args.drop_zero_variance_groups) == (False, True, True)
    assert (args.engine_device, args.vllm_weights_dir, args.vllm_python) == (
        ["cpu"],
        os.path.abspath("weights"),
        "python3",
    )


def test_command_lines_and_yaml_give_flags_and_lists(tmp_path):
    from trl import TrlParser

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("output_dir: unused\nuse_cpu: true\ndry_run: no\ndrop_zero_variance_groups: yes\n")
    command = f"--config {recipe} --deterministic false --engine_device cpu cpu"
    (args,) = TrlParser(A3POConfig).parse_args_and_config(command.split())
    assert (args.dry_run, args.drop_zero_variance_groups, args.deterministic) == (False, True, False)
    assert args.engine_device == ["cpu", "cpu"]


def test_yaml_may_say_on_and_off_without_quotes(tmp_path):
    from trl import TrlParser

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("output_dir: unused\nuse_cpu: true\npacked_forward: on\nshared_prompt: off\n")
    (args,) = TrlParser(A3POConfig).parse_args_and_config(["--config", str(recipe)])
    assert (args.packed_forward, args.shared_prompt) == ("on", "off")


def test_publishing_rarely_is_fine_within_the_bound():
    config(weight_sync_steps=5, max_staleness=4)
    config(weight_sync_steps=2, num_iterations=2, max_staleness=0)


def test_a_parser_understands_every_field():
    from trl import TrlParser

    command = "--output_dir unused --max_staleness 2 --engine vllm --use_cpu true --behavior_weight_cap 3.0"
    command += " --vllm_server_urls http://a http://b"
    (args,) = TrlParser(A3POConfig).parse_args_and_config(command.split())
    assert (args.max_staleness, args.engine, args.behavior_weight_cap) == (2, "vllm", 3.0)
    assert args.vllm_server_urls == ["http://a", "http://b"]
    assert torch.accelerator.is_available() or args.bf16 is False


def test_only_the_main_process_looks_for_the_engines_device(monkeypatch):
    """Another machine need not have it."""
    monkeypatch.setattr(A3POConfig, "process_index", property(lambda self: 8))
    A3POConfig(output_dir="unused", use_cpu=True, engine_device="cuda:99")
