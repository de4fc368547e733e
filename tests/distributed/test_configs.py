"""The accelerate configurations that the recipes name."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests.distributed.launch import ROOT
from trl_a3po.report.trainer_plan import MemorySplit

FOLDER = Path(ROOT) / "recipes" / "accelerate_configs"
STAGES = {"single_gpu": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}


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
def test_each_zero_stage_spreads_one_more_part_of_the_memory(stage, shares):
    split = MemorySplit.of(4, stage)
    assert (split.weights, split.gradients, split.optimizer_states) == shares
