"""Every recipe trains as it is, made small: its objective, schedule, adapter and rewards on a tiny model."""

import json
import math

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.recipes.headers import RECIPES, UNAVAILABLE
from trl_a3po.cli.smoke import save_smoke_model
from trl_a3po.cli.train import run

pytest.importorskip("math_verify", reason="the recipes' reward is math-verify's")
NEEDS_A_SERVER = {"vllm_same_machine", "vllm_elsewhere"}
BY_DEFAULT = NEEDS_A_SERVER  # whose test says what they need


def weights(folder):
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def test_the_tiny_model_reads_and_writes_whole_words(tmp_path):
    save_smoke_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "user : What is 3 + 4 ? assistant : the answer is 7"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem not in BY_DEFAULT)) for path in RECIPES],
)
def test_a_recipe_trains(path, tmp_path):
    if path.stem in NEEDS_A_SERVER:
        pytest.skip("needs a vLLM: test_smoke_vllm.py, with -m vllm")
    try:
        trainer = run([str(path), "--smoke", "--output_dir", str(tmp_path)])
    except ValueError as error:
        if UNAVAILABLE in str(error):
            pytest.skip(str(error))
        raise

    state = json.loads((tmp_path / "trainer_state.json").read_text())
    steps = [entry for entry in state["log_history"] if "reward" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    assert all(math.isfinite(entry["grad_norm"]) for entry in steps)
    assert max(entry["grad_norm"] for entry in steps) > 0
    assert max(entry["a3po/staleness/max"] for entry in steps) <= trainer.args.staleness_bound
    rewards = yaml.safe_load(path.read_text())["reward_funcs"]
    assert {f"rewards/{name.split(':')[-1]}/mean" for name in rewards} <= steps[0].keys()

    trained = weights(tmp_path)
    if (tmp_path / "adapter_config.json").exists():
        assert any(tensor.abs().max() > 0 for name, tensor in trained.items() if "lora_B" in name)
    else:
        before = weights(tmp_path / "smoke_model_0")
        assert any((trained[name] - before[name]).abs().max() > 0 for name in trained)
