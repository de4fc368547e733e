"""The recipe that starts a vLLM trains with one, made small, on a CPU."""

import pytest

from tests.engines.vllm.conftest import vllm_python  # noqa: F401
from tests.recipes.headers import ROOT
from trl_a3po.cli.train import run

pytestmark = pytest.mark.vllm


@pytest.mark.timeout(580)
def test_the_recipe_for_one_machine_trains(vllm_python, tmp_path):  # noqa: F811
    pytest.importorskip("math_verify")
    words = ["--engine_device", "cpu", "--vllm_python", vllm_python, "--output_dir", str(tmp_path)]
    trainer = run([str(ROOT / "recipes" / "vllm_same_machine.yaml"), "--smoke", *words])
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == 3 and max(entry["grad_norm"] for entry in steps) > 0
    assert (tmp_path / "adapter_model.safetensors").exists()
