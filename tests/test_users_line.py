"""When code of the user's own raises, its line is the last that a person sees of the traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

KINDS = ("awaited", "process", "filter", "evaluation", "callback", "transform")
SCRIPT = Path(__file__).parent / "raising_script.py"


@pytest.mark.parametrize("kind", ["thread", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS)])
def test_the_users_line_is_the_last_of_the_traceback(kind, model_path, tmp_path):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), kind, str(model_path), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = run.stderr.rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    assert run.returncode == 1 and lines[frames[-1]].startswith(f'  File "{SCRIPT}", line'), run.stderr[-2000:]
    assert lines[frames[-1] + 1].strip() == "return found[text]"
    assert "KeyError" in lines[-1]
