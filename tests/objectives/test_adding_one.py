"""An objective is added by a file of its own and one row: done here to a copy of the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trl_a3po

pytestmark = pytest.mark.long

MINE = '''
"""An objective of somebody's own: the log-likelihood, weighted by a power of the behavior ratio."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch

from trl_a3po.objectives.inputs import anchor_outside, checked_inputs
from trl_a3po.objectives.objective import Need, Objective, SettingsOfObjective
from trl_a3po.objectives.stats import DecoupledStats
from trl_a3po.protocol.ranges import Range


@torch.no_grad()
def mine_anchor(policy_logps, behavior_logps, staleness, advantages, mask, *, power):
    mask, lt, lb, d = checked_inputs(policy_logps, behavior_logps, staleness, advantages, mask)
    weight = torch.exp(power * (lt - lb))
    rho = torch.exp(lt - lb)
    stats = DecoupledStats.unclipped(rho, mask, d, weight=weight, capped=torch.zeros_like(mask))
    return anchor_outside(mask, lt, policy_logps), weight, stats


MINE = Objective(
    name="mine",
    summary="a power of the behavior ratio",
    formula="`-sg(ρ^power) · A · lt`",
    paper="ours",
    anchor=mine_anchor,
    arguments={"mine_power": "power"},
    plan=lambda settings: f"to the power of {settings.mine_power:g}",
    needs=(Need("loss_type", ("grpo",), "a mean over each completion"),),
)


@dataclass
class MineSettings(SettingsOfObjective):
    _record: ClassVar[Objective] = MINE

    mine_power: Annotated[float, Range(least=0, most=1)] = field(default=0.5, metadata={"help": "The power."})
'''

RUN = """
import json, sys
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.objectives.documentation import objectives_table
from trl_a3po.testing import StubEngine, scripted_completion
from tests.tiny import VOCAB, save_tiny_model, tiny_prompts


def config(**settings):
    base = dict(output_dir="run", use_cpu=True, report_to="none", per_device_train_batch_size=4, num_generations=4)
    base |= dict(max_completion_length=8, max_steps=2, logging_steps=1, save_strategy="no", disable_tqdm=True)
    return A3POConfig(**{**base, **settings})


def refusal(**settings):
    try:
        config(**settings)
    except ValueError as error:
        return str(error)


mine = dict(objective="mine", loss_type="grpo", mine_power=0.25)
engine = StubEngine(scripted_completion(VOCAB, 8))
trainer = A3POTrainer(
    save_tiny_model("model"),
    lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids],
    args=config(**mine, engine=engine, delivery_check_steps=0, log_all_metrics=True),
    train_dataset=tiny_prompts(),
)
trainer.train()
json.dump({
    "plan": config(**mine).plan(),
    "out of range": refusal(objective="mine", loss_type="grpo", mine_power=2.0),
    "of another": refusal(mine_power=0.25),
    "loss type": refusal(objective="mine"),
    "documented": [row for row in objectives_table() if "mine" in row[0]],
    "help": "mine_power (`float`, *optional*, defaults to `0.5`)" in A3POConfig.__doc__,
    "logged": [entry["a3po/rho/mean"] for entry in trainer.state.log_history if "a3po/rho/mean" in entry],
}, open("result.json", "w"))
"""


TESTS = (  # those that look at every objective or setting; the whole of CONTRIBUTING's command takes minutes
    "tests/test_settings_matter.py::test_every_setting_has_an_entry",
    "tests/test_settings_matter.py::test_a_setting_of_an_objective_changes_its_anchor_or_weight[mine_power]",
    "tests/test_docs.py::test_the_tables_of_objectives_are_what_the_records_say",
    "tests/test_docs.py::test_the_page_on_objectives_has_a_row_for_every_objective",
    "tests/test_docs.py::test_every_public_name_is_on_a_page_of_the_api",
)
TIMEOUT = 300


def done_in(folder: Path, *command: str) -> None:
    """Runs Python on the copy of the package in `folder`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The repository with one more objective."""
    copy, root = tmp_path_factory.mktemp("copy"), Path(trl_a3po.__file__).parents[1]
    for name in ("trl_a3po", "tests", "docs"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(root / name, copy / name)
    table = copy / "trl_a3po" / "objectives" / "table.py"
    row = "    M2POSettings,\n"
    source = table.read_text()
    assert source.count(row) == 1
    source = source.replace(row, f"{row}    MineSettings,\n")
    table.write_text(
        source.replace("\n\n\n@dataclass", "\nfrom trl_a3po.objectives.mine import MineSettings\n\n\n@dataclass", 1)
    )
    (table.parent / "mine.py").write_text(MINE)
    return copy


def test_a_file_and_a_row_add_an_objective(copy):
    done_in(copy, "-c", RUN)
    result = json.loads((copy / "result.json").read_text())
    assert "objective:               mine, to the power of 0.25, loss_type grpo" in result["plan"]
    assert "mine_power=2.0 must be a finite number from 0 to 1" in result["out of range"]
    assert "mine_power=0.25 is not used by objective='decoupled'" in result["of another"]
    assert "objective='mine' needs a mean over each completion" in result["loss type"]
    assert result["documented"] == [
        ["`mine`", "a power of the behavior ratio", "`-sg(ρ^power) · A · lt`", "`mine_power`", "ours"]
    ]
    assert result["help"]
    assert len(result["logged"]) == 2


@pytest.mark.long
def test_the_tests_hold_an_objective_that_was_added(copy):
    done_in(copy, "docs/hooks.py")
    done_in(copy, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *TESTS)
