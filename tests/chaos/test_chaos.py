"""A run that lives through every fault of `faults.py`, in many processes one after the other.

Afterwards: along the final lineage every prompt was trained once, and no row more often than its epochs; every token
was within the bound on staleness; every process ended as its fault has it end; every long wait lies near a fault or a
start; and no process, thread, file, socket or segment of shared memory is left.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.driver import PRIVATE_SHARED_MEMORY
from tests.chaos.faults import FAULTS
from tests.chaos.life import BOUND, GROUPS_PER_TAKE, ROWS, STEPS_PER_TAKE
from tests.test_killed_runs import final_lineage, read_trace
from tests.workers.processes import own_shared_memory
from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.choose_checkpoint import newest_valid
from trl_a3po.engines.vllm.servers.folders import remove_leftovers
from trl_a3po.report.timeline import read_timeline

LONG_WAIT, NEAR_SECONDS = 20.0, 60.0


def live_through(folder: Path, *numbers: int) -> dict:
    inside = own_shared_memory("1m")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if inside:
        environment[PRIVATE_SHARED_MEMORY] = "1"
    command = [*inside, sys.executable, "-m", "tests.chaos.driver", str(folder), *map(str, numbers)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads((folder / "report.json").read_text())


def check_chaos(folder: Path, report: dict, steps: int) -> None:
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("logs/*"))[:3])
    assert not report["problems"], "\n".join([*report["problems"], logs])
    trace = read_trace(folder)
    assert any(line.get("end") == steps for line in trace)
    check_what_was_trained(folder, trace, steps)
    check_waits(folder, trace)
    assert os.listdir(folder / "tmp") == []
    remove_leftovers(folder / "vllm")  # of a process that was killed; the next engine there does it
    assert list(folder.glob("vllm/*")) == []


def check_what_was_trained(folder: Path, trace: list[dict], steps: int) -> None:
    lineage = final_lineage(trace)
    assert [take["take"] for take in lineage] == list(range(0, steps, STEPS_PER_TAKE))
    prompts = [index for take in lineage for index in take["prompts"]]
    assert max(Counter(prompts).values()) == 1
    assert len(prompts) == steps // STEPS_PER_TAKE * GROUPS_PER_TAKE
    saved = newest_valid(folder)
    assert saved.name == f"checkpoint-{steps}"
    outcomes = checkpoint.read_json(saved / checkpoint.STATE)["queue"]["outcomes"]
    ends = outcomes["prompt_outcomes"]
    rejected = sum(count for outcome, count in ends.items() if outcome.startswith("rejected: "))
    assert set(ends) - {"trained"} == {outcome for outcome in ends if outcome.startswith("rejected: reward ")}
    assert ends["trained"] == len(prompts) and outcomes["prompts"] == len(prompts) + rejected
    assert len(set(range(outcomes["prompts"])) - set(prompts)) == rejected
    rows = [row for take in lineage for row in take["rows"]]
    epochs = -(-outcomes["prompts"] // ROWS)
    assert max(Counter(rows).values()) <= epochs and len(rows) + rejected > (epochs - 1) * ROWS
    for take in lineage:
        assert 0 <= take["oldest"] <= take["newest"] <= take["take"] <= take["oldest"] + BOUND


def check_waits(folder: Path, trace: list[dict]) -> None:
    """A take that lasts long begins soon after a fault or a start, or there is one meanwhile."""
    causes = [line["time"] for line in trace if "time" in line]
    for take in read_timeline(folder, "take"):
        if take["ended"] - take["began"] > LONG_WAIT:
            assert any(take["began"] - NEAR_SECONDS < cause < take["ended"] for cause in causes), take


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_lives_through_every_fault(tmp_path):
    report = live_through(tmp_path, 160, 0, 8, 2, 1)
    check_chaos(tmp_path, report, 160)
    missing = {name for name, count in report["faults"].items() if not count}
    assert missing <= ({"shared memory full"} if not own_shared_memory("1m") else set())


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_a_long_run_lives_through_a_thousand_faults(tmp_path):
    report = live_through(tmp_path, 5000, 1, 100, 22, 8)
    check_chaos(tmp_path, report, 5000)
    assert report["total"] >= 1000 and set(report["faults"]) == set(FAULTS)
