"""SIGKILL at random points, resumed each time: along the final lineage every prompt is trained once."""

import json
import os
import random
import signal
import sys
import time
from collections import Counter

import pytest

from tests.forked import Forked
from tests.killed_run import BOUND, GENERATIONS, ROWS
from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.choose_checkpoint import newest_valid
from trl_a3po.report.run_process import is_gone
from trl_a3po.report.timeline import read_timeline

START_SECONDS, STEP_SECONDS = 240, 60


def read_trace(folder):
    path = folder / "trace.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(folder, steps, *, kill_at=None, moment=0.0):
    """One process; killed `moment` seconds after it has written a take at version `kill_at` or later."""
    begun = len(read_trace(folder))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = Forked("tests.killed_run", folder, steps, environment=environment, output=folder / "printed")
    try:
        if kill_at is not None:
            deadline = time.monotonic() + START_SECONDS
            while process.returncode is None and all(e.get("take", -1) < kill_at for e in read_trace(folder)[begun:]):
                assert time.monotonic() < deadline, "the run takes nothing"
                time.sleep(0.005)
            time.sleep(moment)
            process.send_signal(signal.SIGKILL)
        process.wait(START_SECONDS + steps * STEP_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (0 if kill_at is None else -signal.SIGKILL), process.printed[-3000:]


def final_lineage(trace):
    """The takes whose training is in the final weights: of each process, those before the step its successor goes on
    from."""
    takes = []
    for entry in trace:
        if "start" in entry:
            takes = [take for take in takes if take["take"] < entry["start"]]
        elif "take" in entry:
            takes.append(entry)
    return takes


def check_killed_run(folder, *, kills, steps, seed):
    noise = random.Random(seed)
    for kill_at in sorted(noise.choices(range(steps // 2), k=kills)):  # each kill may let some more steps pass
        run(folder, steps, kill_at=kill_at, moment=noise.random() * 0.5)
        assert sys.platform != "linux" or is_gone(read_timeline(folder, "start")[-1]["process"])
    run(folder, steps)
    trace = read_trace(folder)
    assert sum("start" in entry for entry in trace) == kills + 1
    assert trace[-1] == {"end": steps}
    lineage = final_lineage(trace)
    assert [take["take"] for take in lineage] == list(range(0, steps, 2))  # two optimizer steps a batch
    prompts = [index for take in lineage for index in take["prompts"]]
    total = steps * 2 * 4 // (2 * GENERATIONS)
    assert sorted(prompts) == list(range(total))
    rows = {index: row for take in lineage for index, row in zip(take["prompts"], take["rows"], strict=True)}
    for epoch in range(total // ROWS):
        of_epoch = Counter(rows[index] for index in range(epoch * ROWS, (epoch + 1) * ROWS))
        assert of_epoch == Counter(range(ROWS))
    for take in lineage:
        assert 0 <= take["oldest"] <= take["newest"] <= take["take"] <= take["oldest"] + BOUND
    assert newest_valid(folder).name == f"checkpoint-{steps}"
    outcomes = checkpoint.read_json(folder / f"checkpoint-{steps}" / checkpoint.STATE)["queue"]["outcomes"]
    assert outcomes["prompts"] == outcomes["prompt_outcomes"]["trained"] == total
    assert outcomes["attempts"] == sum(outcomes["attempt_outcomes"].values())
    told = read_timeline(folder)
    trained = [line["prompt"] for line in told if line["kind"] == "group" and line["outcome"] == "trained"]
    assert sorted(trained) == list(range(total))
    assert [line["version"] for line in told if line["kind"] == "step"] == list(range(1, steps + 1))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_killed_twice_trains_every_prompt_of_each_epoch_once(tmp_path):
    check_killed_run(tmp_path, kills=2, steps=24, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_killed_ten_times_trains_every_prompt_of_each_epoch_once(tmp_path):
    check_killed_run(tmp_path, kills=10, steps=96, seed=1)
