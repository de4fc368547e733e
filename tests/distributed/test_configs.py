"""The accelerate configurations that the recipes name."""

from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from transformers import AutoModelForCausalLM

from tests.distributed.launch import ROOT
from tests.tiny import tiny_config
from trl_a3po import A3POConfig
from trl_a3po.report.memory import TrainerMemory

FOLDER = Path(ROOT) / "recipes" / "accelerate_configs"
STAGES = {"single_gpu": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3, "fsdp2": 0}


def test_every_configuration_is_known_here():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(STAGES)


@pytest.mark.parametrize(("name", "stage"), STAGES.items())
def test_a_configuration_says_what_its_name_says_and_when_to_choose_it(name, stage):
    path = FOLDER / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert (config.deepspeed_config or {}).get("zero_stage", 0) == stage
    assert ((config.deepspeed_config or {}).get("offload_param_device") == "cpu") == name.endswith("offload")
    assert path.read_text().startswith("# ") and "# Choose it" in path.read_text()


@pytest.mark.parametrize(("stage", "shares"), [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))])
def test_each_zero_stage_spreads_one_more_part_of_the_memory(tmp_path, stage, shares):
    args, model = A3POConfig(output_dir=str(tmp_path)), AutoModelForCausalLM.from_config(tiny_config())
    whole, split = TrainerMemory.of(args, model), TrainerMemory.of(args, model, processes=4, zero_stage=stage)
    parts = (whole.weights // split.weights, whole.gradients // split.gradients, whole.states // split.states)
    assert parts == shares


def test_fsdp2_spreads_all_of_it_and_trains_float32(tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.bfloat16)
    whole = TrainerMemory.of(A3POConfig(output_dir=str(tmp_path)), model)
    split = TrainerMemory.of(A3POConfig(output_dir=str(tmp_path), bf16=True, use_cpu=True), model, 4, fsdp=True)
    assert (split.weights, split.gradients, split.states) == (
        whole.weights // 2,
        whole.gradients // 2,
        whole.states // 2,
    )


def test_the_fsdp_configuration_is_one_that_is_accepted():
    options = load_config_from_file(str(FOLDER / "fsdp2.yaml")).fsdp_config
    assert options["fsdp_version"] == 2 and not options["fsdp_activation_checkpointing"]
