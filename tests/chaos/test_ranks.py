"""A run of two processes, without a launcher, of which one is killed at a random moment, several times.

The other one ends by itself and says why, with the reward worker; the next two go on from the newest checkpoint. At
the end every prompt was trained once, and the weights are those of two processes that were never killed.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.chaos.ranks import GROUPS_PER_STEP
from tests.distributed.launch import free_port
from tests.forked import ROOT, Forked
from tests.test_killed_runs import read_trace
from tests.tiny import save_tiny_model
from tests.workers.processes import is_gone, until
from trl_a3po.report.timeline import read_timeline

LIFE_SECONDS = 400.0
WHY = r"[Pp]rocess \d of 2|key-value store of the run is gone"


def two_processes(folder: Path, steps: int) -> list[Forked]:
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    life = len(list(folder.glob("printed_0_*")))
    return [
        Forked(
            *("tests.chaos.ranks", folder, steps),
            environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            output=folder / f"printed_{rank}_{life}",
        )
        for rank in range(2)
    ]


def live(folder: Path, steps: int, victim: int | None = None, kill_at: int = 0, moment: float = 0.0) -> None:
    """Two processes until the end of the run, or until the victim is killed `moment` seconds after a step from
    `kill_at` on has begun, and the other one has ended because of it."""
    begun = len(read_trace(folder))
    processes = two_processes(folder, steps)
    try:
        if victim is not None:
            until(lambda: any(line.get("begins", -1) >= kill_at for line in read_trace(folder)[begun:]), LIFE_SECONDS)
            time.sleep(moment)
            processes[victim].send_signal(signal.SIGKILL)
        for process in processes:
            process.wait(LIFE_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    printed = [process.printed for process in processes]
    told = read_trace(folder)[begun:]
    if victim is None:
        assert [process.returncode for process in processes] == [0, 0], "\n".join(text[-3000:] for text in printed)
    else:
        assert processes[victim].returncode == -signal.SIGKILL, printed[victim][-3000:]
        assert processes[1 - victim].returncode == 1 and re.search(WHY, printed[1 - victim]), printed[1 - victim]
    for pid in {pid for line in told for pid in line.get("workers", ())}:
        until(lambda pid=pid: is_gone(pid))


def check_killed_ranks(folder: Path, *, kills: int, steps: int, seed: int) -> None:
    dice = random.Random(seed)
    victims = [number % 2 for number in range(kills)]
    dice.shuffle(victims)
    save_tiny_model(folder / "model")
    for victim, kill_at in zip(victims, sorted(dice.choices(range(1, steps // 2), k=kills)), strict=True):
        live(folder, steps, victim, kill_at, moment=dice.random() * 0.2)
    live(folder, steps)
    trace = read_trace(folder)
    check_starts(trace, kills)
    check_what_was_trained(folder / "run", steps)
    whole = folder / "whole"
    save_tiny_model(whole / "model")
    live(whole, steps)
    expected, found = (load_file(path / "final" / "model.safetensors") for path in (whole, folder))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0, msg=name)


def check_starts(trace: list[dict], kills: int) -> None:
    """Both go on from the same step, and lose no step whose checkpoint they had both gone beyond."""
    starts = [[line["start"] for line in trace if "start" in line and line["rank"] == rank] for rank in range(2)]
    assert starts[0] == starts[1] and len(starts[0]) == kills + 1
    last = 0
    for line in trace:
        if "start" in line:
            assert line["start"] >= last
        else:
            last = max(last, line["begins"])


def check_what_was_trained(run: Path, steps: int) -> None:
    told = read_timeline(run)
    trained = [line["prompt"] for line in told if line["kind"] == "group" and line["outcome"] == "trained"]
    assert sorted(trained) == list(range(len(trained))) and len(trained) == steps * GROUPS_PER_STEP
    assert [line["version"] for line in told if line["kind"] == "step"] == list(range(1, steps + 1))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_whose_processes_are_killed_one_at_a_time_goes_on_exactly(tmp_path):
    check_killed_ranks(tmp_path, kills=2, steps=24, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_whose_processes_are_killed_ten_times_goes_on_exactly(tmp_path):
    check_killed_ranks(tmp_path, kills=10, steps=48, seed=1)
