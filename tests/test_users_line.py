"""When code of the user's own raises, its line is the last that a person sees of the traceback."""

import os

import pytest

from tests.forked import ROOT, Forked

pytestmark = pytest.mark.long

KINDS = ("awaited", "process", "filter", "evaluation", "callback", "transform")
SCRIPT = ROOT / "tests" / "raising_script.py"


@pytest.mark.parametrize("kind", ["thread", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS)])
def test_the_users_line_is_the_last_of_the_traceback(kind, model_path, tmp_path):
    run = Forked(
        "tests.raising_script", kind, model_path, tmp_path, environment=os.environ, output=tmp_path / "printed"
    )
    assert run.wait(300) == 1, run.printed[-2000:]
    lines = run.printed.rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    assert lines[frames[-1]].startswith(f'  File "{SCRIPT}", line'), run.printed[-2000:]
    assert lines[frames[-1] + 1].strip() == "return found[text]"
    assert "KeyError" in lines[-1]
