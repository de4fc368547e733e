"""The staleness study: a short run of it, and what it says of numbers made up to confirm or refute it."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "recipes" / "staleness_study.py"


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PATH.parent)
        yield loaded()


def loaded():
    spec = importlib.util.spec_from_file_location("staleness_study", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_a_part_of_it_runs_and_draws(study, tmp_path, monkeypatch, capsys):
    arguments = ["--staleness", "2", "--methods", "loglinear", "--seeds", "0", "--steps", "8"]
    monkeypatch.setattr(sys, "argv", [str(PATH), *arguments, "--output", str(tmp_path)])
    study.main()
    assert (tmp_path / "staleness_study.png").stat().st_size > 10_000
    assert "log r / log ρ is 0.500, predicted 1/d = 0.500: confirmed" in capsys.readouterr().out


def test_a_file_is_no_folder_to_write_into_and_nothing_is_trained(study, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", [str(PATH), "--output", str(tmp_path / "file")])
    monkeypatch.setattr(study, "run", lambda *arguments: pytest.fail("trained"))
    with pytest.raises(SystemExit, match=r"^--output is '.*file', but this folder cannot be made \("):
        study.main()


def made_up(clipped, contraction):
    return [{"clipped": clipped, "contraction": contraction}]


def test_the_verdicts_follow_the_numbers(study):
    agree = {
        ("loglinear", 2): made_up(0.02, 0.5),
        ("loglinear", 8): made_up(0.01, 0.125),
        ("behavior", 2): made_up(0.1, 1.0),
        ("behavior", 8): made_up(0.3, 1.0),
    }
    assert all("refuted" not in line for line in study.verdicts(agree)) and len(study.verdicts(agree)) == 5
    differ = {**agree, ("loglinear", 8): made_up(0.4, 0.5)}
    assert sum("refuted" in line for line in study.verdicts(differ)) == 3
