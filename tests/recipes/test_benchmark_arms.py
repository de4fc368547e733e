"""`recipes/benchmarks/arms.py`: what is left of an arm that is cut, that fails, and that ends."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"
SCRIPT = """
import argparse, os, pathlib, subprocess, time, types
from arms import add_arguments, end_arm, run_arms, step_notes

HANGS = pathlib.Path("hangs.now")

class Hurried(subprocess.Popen):
    "The time of an arm is over as soon as it hangs."
    def wait(self, timeout=None):
        while timeout == 45.0 and self.poll() is None:
            if HANGS.exists():
                HANGS.unlink()
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.05)
        return super().wait(timeout)

subprocess.Popen = Hurried

parser = argparse.ArgumentParser()
add_arguments(parser, arms=["hangs", "breaks", "never", "whole"], timeout=45.0, json="numbers.json")
arguments = parser.parse_args()
arguments.shape = "no"
if arguments.arm in ("whole", "breaks"):
    run = pathlib.Path(arguments.folder) / "run"
    run.mkdir()
    (run / "timeline.jsonl").write_text(f"of {arguments.arm}")
if arguments.arm == "whole":
    end_arm(arguments, {"step": 0.25, "steps": 8})
if arguments.arm:
    open(f"{arguments.arm}.pid", "w").write(str(os.getpid()))
    notes = step_notes(arguments, 2, lambda: {"step": 0.5, "steps": 3})
    steps = 2 if arguments.arm == "never" else 5
    notes.on_log(None, types.SimpleNamespace(global_step=steps, is_world_process_zero=True), None)
    if arguments.arm == "hangs":
        HANGS.touch()
        time.sleep(600)
    raise RuntimeError(f"{arguments.arm} at its end")
run_arms(arguments, ("step",))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder a benchmark ran in, and what it printed."""
    folder = tmp_path_factory.mktemp("arms")
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def numbers(folder: Path, arm: str) -> dict:
    return json.loads((folder / "numbers.json").read_text())["arms"][arm]


def test_a_whole_arm_has_its_result_alone(run):
    folder, printed = run
    assert numbers(folder, "whole") == {"step": 0.25, "steps": 8}
    assert "step 0.25" in printed


def test_one_cut_at_its_limit_has_the_steps_it_had_measured(run):
    folder, printed = run
    assert numbers(folder, "hangs").items() >= {"step": 0.5, "steps": 3}.items()
    assert numbers(folder, "hangs")["cut"].startswith("took more than 45 s")
    assert "SignalException" not in printed
    assert "CUT after 3 measured steps): step 0.5" in printed


def test_one_cut_at_its_limit_leaves_no_process(run):
    folder, _ = run
    pid, deadline = int((folder / "hangs.pid").read_text()), time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_raises_after_some_steps_is_not_taken_for_a_whole_one(run):
    folder, printed = run
    assert numbers(folder, "breaks")["steps"] == 3
    assert "breaks at its end" in numbers(folder, "breaks")["cut"] and "breaks at its end" in printed


def test_steps_that_are_not_measured_leave_no_numbers(run):
    folder, _ = run
    assert numbers(folder, "never").keys() == {"cut"}


def test_the_timelines_of_the_arms_are_kept_beside_the_numbers(run):
    folder, _ = run
    with tarfile.open(folder / "numbers.timelines.tar.gz") as archive:
        kept = {member.name: archive.extractfile(member).read() for member in archive}
    assert kept == {"breaks/timeline.jsonl": b"of breaks", "whole/timeline.jsonl": b"of whole"}
