"""The recipe a new user runs first, on the real model, for a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trl_a3po.cli.smoke import save_smoke_model

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.py"


def run_quickstart(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(RECIPE), "--output_dir", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_quickstart_trains_the_real_model_and_shows_it(tmp_path):
    printed = run_quickstart(tmp_path, "--steps", "4")
    assert "Held-out sums" in printed and "held-out sums, after" in printed
    history = json.loads((tmp_path / "log_history.json").read_text())
    steps = [entry for entry in history if "reward" in entry]
    assert len(steps) == 4 and max(entry["a3po/staleness/max"] for entry in steps) == 2
    assert (tmp_path / "run.png").stat().st_size > 10_000
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.long
def test_a_finished_run_goes_on_from_its_newest_checkpoint(tmp_path):
    save_smoke_model(tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--learning_rate", "1e-3", "--steps"]
    run_quickstart(tmp_path, *options, "2")
    assert "trained to optimizer step 3" in run_quickstart(tmp_path, *options, "3", "--resume")
    history = json.loads((tmp_path / "log_history.json").read_text())
    assert [entry["step"] for entry in history if "reward" in entry] == [1, 2, 3]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises(tmp_path, seed):
    run_quickstart(tmp_path, "--seed", str(seed))
    history = json.loads((tmp_path / "log_history.json").read_text())
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    assert len(rewards) == 30
    assert sum(rewards[-6:]) / 6 - sum(rewards[:6]) / 6 >= 0.2
