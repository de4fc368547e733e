"""A training that is started without standard input, output or error, as by cron or `python train.py <&-`."""

import os
import subprocess
import sys

import pytest

RUN = """
import sys
from pathlib import Path
from tests.runs import build

folder = Path(sys.argv[1])
trainer = build(sys.argv[2], folder, max_steps=2, engine="transformers", engine_threads=1)
trainer.train()
(folder / "steps").write_text(str(trainer.state.global_step))
"""
NO_PLACE_IS_TAKEN = """
import os, sys
for fd in map(int, sys.argv[1:]):
    os.close(fd)
from trl_a3po.workers.standard_files import above_standard_files
with above_standard_files():
    fds = os.pipe()
left = [fd for fd in range(3) if os.path.exists(f"/proc/self/fd/{fd}")]
os._exit(0 if min(fds) > 2 and left == sorted({0, 1, 2} - set(map(int, sys.argv[1:]))) else 1)
"""


@pytest.mark.parametrize("closed", ["0", "1", "0 1", "0 2", "0 1 2"])
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_files_stay_out_of_the_places_of_standard_files(closed):
    result = subprocess.run([sys.executable, "-c", NO_PLACE_IS_TAKEN, *closed.split()], timeout=120)
    assert result.returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("closed", [pytest.param("<&-", marks=pytest.mark.slow), "<&- >&- 2>&-"])
def test_a_run_without_standard_files_trains(model_path, tmp_path, closed):
    command = f'exec "$0" -c "$1" "$2" "$3" {closed}'
    subprocess.run(
        ["sh", "-c", command, sys.executable, RUN, str(tmp_path), model_path],
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1"},
    )
    assert (tmp_path / "steps").read_text() == "2"
