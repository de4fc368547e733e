"""The learning study: its rows and scores, the order of its runs, what is left of a run that is cut, its verdicts."""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(autouse=True)
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES)


@pytest.mark.parametrize("task", ["sums", "spelling"])
def test_a_score_is_that_of_reasoning_gym(task):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    from learning.tasks import TASKS, rows

    theirs = reasoning_gym.create_dataset(TASKS[task].source, size=1, seed=0, **TASKS[task].settings)
    for row in rows(task, "held_out"):
        right = row["answer"]
        changed = (right.upper(), f"+{right}", f"0{right}", f"{right}.0", f"{right}, so", right[:-1], right[::-1])
        for said in (right, *changed, f"{right}xyz", "7", "1,000", "NaN", " ", ""):
            text = said.replace(" ", "") if task == "spelling" else said
            expected = theirs.score_answer(text, {"answer": right})
            assert TASKS[task].score(said, right) == pytest.approx(expected), (said, right)


@pytest.mark.parametrize("task", ["sums", "spelling"])
def test_no_held_out_question_is_trained_on(task):
    from learning.tasks import HELD_OUT, TRAINED, rows

    trained, held_out = ({row["question"] for row in rows(task, split)} for split in ("train", "held_out"))
    assert len(trained) == TRAINED and len(held_out) == HELD_OUT and not trained & held_out


@pytest.mark.parametrize("task", ["sums", "spelling"])
def test_the_rows_are_those_that_reasoning_gym_draws(task):
    pytest.importorskip("reasoning_gym")
    from learning.tasks import draw_rows, rows

    assert draw_rows(task) == rows(task, "held_out") + rows(task, "train")


def arguments(**changed) -> argparse.Namespace:
    given = {"tasks": ["sums", "spelling"], "methods": ["behavior", "loglinear"], "staleness": [0, 2], "seeds": [0, 1],
             "learning_rate": 1e-5, "clock_seeds": [0], "rates": [1e-6, 1e-5], "caps": [5.0, math.inf]}  # fmt: skip
    return argparse.Namespace(**given | changed)


def test_every_cell_of_the_first_task_has_a_run_before_any_has_two():
    from learning_study import study_runs

    runs = study_runs(arguments())
    assert [(run.task, run.seed) for run in runs] == [
        *[("sums", 0)] * 3, *[("sums", 1)] * 3, *[("spelling", 0)] * 3, *[("spelling", 1)] * 3
    ]  # fmt: skip
    assert [(run.staleness, run.method) for run in runs[:3]] == [(0, "behavior"), (2, "behavior"), (2, "loglinear")]


@pytest.mark.parametrize(("given", "seeds"), [("", []), ("--gpus 0 1", [0, 1]), ("--clock_seeds 3", [3])])
def test_a_cpu_has_clock_runs_only_if_they_are_asked_for(given, seeds, monkeypatch):
    from learning_study import clock_runs, parse_arguments

    monkeypatch.setattr(sys, "argv", ["learning_study.py", *given.split()])
    assert [run.seed for run in clock_runs(parse_arguments())] == [seed for seed in seeds for _ in range(2)]


def test_every_run_has_a_file_of_its_own():
    from learning_study import clock_runs, study_runs, sweep_runs

    runs = [*clock_runs(arguments()), *study_runs(arguments()), *sweep_runs(arguments(staleness=[2, 8]))]
    assert len({run.name for run in runs}) == len(runs) == 2 + 12 + 16


def test_every_run_is_a_configuration_that_trains(tmp_path):
    from learning.runs import METHODS, Run, Settings, config

    settings = Settings("model", steps=2, prompts=2, generations=2, output=str(tmp_path))
    for method in METHODS:
        for cap in (None, 1.5, math.inf) if method == "loglinear" else (None,):
            args = config(Run("sums", method, 2, 0, 1e-5, cap), settings)
            assert (args.schedule, args.max_staleness, args.loss_type) == ("fixed_lag", 2, "grpo")
            assert (args.behavior_weight_mode == "none") == (cap == math.inf or method == "loglinear, no cap")


def write_run(folder: Path, run, rewards, *, done: bool, cut_line: bool = False, **columns) -> None:
    lines = [{"run": vars(run), "steps": 10}]
    lines += [
        {"step": i + 1, "seconds": 2.0 * i, "reward": reward, **{name: values[i] for name, values in columns.items()}}
        for i, reward in enumerate(rewards)
    ]
    if done:
        lines.append({"done": True, "held_out_before": 0.1, "held_out": rewards[-1], "total_seconds": 9.0})
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines) + ('{"step": 9, "rew' if cut_line else "")
    (folder / "runs" / f"{run.name}.jsonl").write_text(text)


def a_run(method="loglinear", staleness=2, seed=0, rate=1e-5, **more):
    from learning.runs import Run

    return Run("sums", method, staleness, seed, rate, **more)


def test_a_finished_run_is_left_out_and_a_cut_one_is_begun_again(tmp_path):
    from learning.results import read_results, write_results
    from learning_study import remaining

    whole, cut, new = a_run(seed=0), a_run(seed=1), a_run(seed=2)
    write_run(tmp_path, whole, [0.1, 0.2], done=True)
    write_run(tmp_path, cut, [0.1], done=False, cut_line=True)
    assert remaining([whole, cut, new], tmp_path) == [cut, new]
    results = read_results(tmp_path)
    assert {one.run.seed: one.steps["reward"] for one in results} == {0: [0.1, 0.2], 1: [0.1]}

    # On another machine there is the table alone; a run that was cut there is longer than one that began here.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_results(elsewhere, results)
    write_run(elsewhere, cut, [], done=False)
    assert {one.run.seed: len(one) for one in read_results(elsewhere)} == {0: 2, 1: 1}
    assert remaining([whole, cut, new], elsewhere) == [cut, new]


def test_a_summary_leaves_out_the_steps_before_the_lag():
    from learning.results import summary

    steps = {
        "reward": [0.0] * 8 + [0.5, 1.0],
        "clip_low": [1.0, 1.0] + [0.25] * 8,
        "clip_high": [0.0] * 10,
        "r_max": [9.0, 9.0] + [2.0] * 7 + [3.0],
        "rho_max": [9.0, 9.0] + [4.0] * 7 + [9.0],
    }
    found = summary(steps, staleness=2)
    assert (found["reward"], found["clipped"], found["r max"], found["rho max"]) == (0.75, 0.25, 3.0, 9.0)
    assert found["contraction"] == pytest.approx(0.5) and math.isnan(found["entropy"])


@pytest.mark.parametrize(
    ("differences", "margin", "said"),
    [
        ([0.10, 0.11, 0.12], 0.0, "holds"),  # mean 0.11, t·s/√3 = 0.025
        ([-0.10, -0.11, -0.12], 0.0, "refuted"),
        ([0.01, 0.2, 0.02], 0.0, "open, all seeds agree"),
        ([-0.01, -0.2, -0.02], 0.0, "open, all seeds are against it"),
        ([-0.01, 0.2, 0.02], 0.0, "open"),
        ([-0.010, -0.011, -0.012], 0.02, "holds"),
        ([0.3], 0.0, "open, one seed agrees"),
        ([], 0.0, "not run"),
    ],
)
def test_a_verdict_says_how_far_the_seeds_carry_it(differences, margin, said):
    from learning.results import judge

    assert judge(differences, margin) == said


def test_the_width_of_an_interval_is_that_of_students_t():
    from learning.results import T_95

    def share_within(t: float, freedom: int) -> float:  # by the midpoint rule on the density
        scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
        places = ((i + 0.5) * t / 10_000 for i in range(10_000))
        return 2 * sum(scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2) * t / 10_000 for x in places)

    assert all(share_within(t, pairs - 1) == pytest.approx(0.95, abs=1e-4) for pairs, t in T_95.items())


def test_the_report_compares_runs_of_the_same_seed_and_draws_them(tmp_path):
    from learning.report import draw, draw_sweep, table, verdicts
    from learning.results import read_results

    for seed in range(3):
        for method, reward in (("loglinear", 0.5), ("behavior", 0.3)):
            curve = [reward + 0.1 * seed + 0.001 * step for step in range(10)]
            ratios = {
                "r_max": [2.0] * 10,
                "rho_max": [4.0] * 10,
                "clip_low": [0.0] * 10,
                "clip_high": [1 - reward] * 10,
            }
            write_run(tmp_path, a_run(method, seed=seed), curve, done=True, **ratios)
    write_run(tmp_path, a_run("GRPOTrainer", 0, alone=True), [0.0] * 3 + [0.5] * 7, done=True)
    write_run(tmp_path, a_run("async", 2, alone=True), [0.0] + [0.5] * 9, done=True)
    results = read_results(tmp_path)
    said = "\n".join(verdicts(results))
    assert "anchor (sums, d 2): reward +0.2 (± " in said and "3 seeds): holds" in said
    assert "1/d = 0.5: holds, by construction" in said
    assert "reward 0.45 (nine tenths of GRPOTrainer's last) after 14.0 s with GRPOTrainer, 10.0 s with" in said
    assert table(results, "learning rate 1e-05").row_count == 4
    draw(results, "sums", tmp_path / "steps.png")
    draw_sweep(results, tmp_path / "sweep.png")
    assert (tmp_path / "steps.png").stat().st_size > 8_000 and not (tmp_path / "sweep.png").exists()


def test_learning_rates_are_reported_apart_and_drawn_together(tmp_path):
    from learning_study import report
    from rich.console import Console

    for rate, reward in ((1e-5, 0.5), (1e-6, 0.2)):
        for run in (a_run(rate=rate), a_run(rate=rate, staleness=8), a_run(rate=rate, cap=2.0)):
            write_run(tmp_path, run, [reward] * 10, done=True)
    console = Console(width=220, record=True)
    report(tmp_path, console)
    text = (tmp_path / "report.txt").read_text()
    first, second = text.index("learning rate 1e-06"), text.index("learning rate 1e-05")
    assert "0.2" in text[first:second] and "0.5" not in text[first:second]
    assert "0.5" in text[second:] and "0.2" not in text[second:]
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "learning_sums_1e-06.png",
        "learning_sums_1e-05.png",
        "learning_sweep.png",
    }


def test_the_first_steps_of_a_cut_run_are_compared(tmp_path):
    from learning.results import first_steps, read_results

    write_run(tmp_path, a_run(seed=0), [0.1, 0.2, 0.9], done=True)
    write_run(tmp_path, a_run(seed=1), [0.3, 0.4], done=False)
    write_run(tmp_path, a_run(seed=2), [0.5], done=False)
    first = first_steps(read_results(tmp_path), 2)
    assert {one.run.seed: one.steps["reward"] for one in first} == {0: [0.1, 0.2], 1: [0.3, 0.4]}
    assert all(one.done and math.isnan(one.end["held_out"]) for one in first)


def test_no_steps_cannot_be_compared(monkeypatch, capsys):
    from learning_study import parse_arguments

    monkeypatch.setattr(sys, "argv", ["learning_study.py", "--figure", "--until", "0"])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "--until is 0, but it must be a number of steps, 1 or more" in capsys.readouterr().err


def refused(monkeypatch, *given) -> str:
    """The sentence with which the study ends."""
    from learning_study import main

    monkeypatch.setattr(sys, "argv", ["learning_study.py", "--figure", *map(str, given)])
    with pytest.raises(SystemExit) as ended:
        main()
    sentence = str(ended.value)
    assert len(sentence.splitlines()) == 1
    return sentence


@pytest.mark.parametrize("file", ["results.jsonl", "runs/one.jsonl"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{garbled\n", "line 1 is not JSON: "),
        (b"\xff\xfe\n", "line 1 is not JSON: "),
        (b"[1]\n", "line 1 is list in JSON"),
        (b'{"no": 1}\n', "KeyError: 'run'"),
        (b'{"run": {"no": 1}, "steps": {}, "end": {}}\n', "TypeError: "),
    ],
)
def test_a_file_that_is_not_of_the_study_is_named(tmp_path, monkeypatch, file, content, words):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    sentence = refused(monkeypatch, "--output", tmp_path)
    assert sentence.startswith(f"{path} is no file of this study ({words}")
    assert sentence.endswith("remove it, or pass another folder as --output.")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 5},
        {"steps": {}},
        {"steps": {"reward": ["0.5"]}},
        {"steps": {"reward": []}},
        {"end": 7},
        {"end": {"done": True}},
        {"run": {"staleness": "8"}},
    ],
    ids=str,
)
def test_a_part_of_another_kind_is_named(tmp_path, monkeypatch, change):
    run = {"task": "sums", "method": "plain", "staleness": 8, "seed": 0, "learning_rate": 1e-5} | change.get("run", {})
    line = {"steps": {"reward": [0.5]}, "end": {"done": True, "held_out": 0.5}} | change | {"run": run}
    (tmp_path / "results.jsonl").write_text("\n" + json.dumps(line) + "\n")
    assert "results.jsonl is no file of this study (" in refused(monkeypatch, "--output", tmp_path)


def test_a_folder_in_place_of_a_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "results.jsonl").mkdir()
    assert "results.jsonl" in refused(monkeypatch, "--output", tmp_path)


@pytest.mark.parametrize("inside", ["", "/folder"])
def test_a_file_is_no_folder_to_write_into(tmp_path, monkeypatch, inside):
    (tmp_path / "file").write_text("")
    output = f"{tmp_path}/file{inside}"
    assert f"--output is {output!r}, but this folder cannot be made (" in refused(monkeypatch, "--output", output)


def test_two_studies_do_not_write_into_one_folder(tmp_path):
    from learning_study import alone_in

    with (
        alone_in(tmp_path),
        pytest.raises(SystemExit, match=r"Another study is training into .*--output"),
        alone_in(tmp_path),
    ):
        pass
    with alone_in(tmp_path):
        pass


def test_a_few_steps_are_reported_too(tmp_path):
    from learning_study import report
    from rich.console import Console

    write_run(tmp_path, a_run(), [0.1, 0.2], done=True)
    write_run(tmp_path, a_run(seed=1), [], done=False)
    report(tmp_path, Console(width=220, record=True))
    assert "sums" in (tmp_path / "report.txt").read_text() and not list(tmp_path.glob("*.png"))


def note(item: str, folder: str) -> None:
    path = Path(folder) / item
    if item == "fails" and not path.exists():
        path.write_text("once")
        raise RuntimeError("this one fails")
    if item == "hangs":
        path.write_text("began")
        time.sleep(600)
    path.write_text("done")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_that_fails_or_hangs_leaves_the_others_alone(tmp_path, monkeypatch):
    from learning import parallel

    def written() -> dict[str, str]:
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    def deadline_passes_after_the_others() -> float:
        return float(written() == {"first": "done", "fails": "once", "hangs": "began", "last": "done"})

    items = ["first", "fails", "hangs", "last"]
    seen = []
    clock = SimpleNamespace(monotonic=deadline_passes_after_the_others, sleep=time.sleep)
    monkeypatch.setattr(parallel, "time", clock)
    parallel.run_parallel(
        partial(note, folder=str(tmp_path)), items, gpus=[], parallel=2, deadline=1.0, watch=lambda: seen.append(1)
    )
    assert seen
    assert {item: (tmp_path / item).read_text() for item in items} == {
        "first": "done", "fails": "once", "hangs": "began", "last": "done"
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_study_trains_reports_and_goes_on(tmp_path):
    from trl_a3po.cli.smoke import save_smoke_model

    save_smoke_model(tmp_path / "model")
    small = ["--model", str(tmp_path / "model"), "--steps", "6", "--prompts", "2", "--generations", "2"]
    cells = ["--tasks", "spelling", "--methods", "loglinear", "plain", "--staleness", "2", "--seeds", "0"]
    command = [sys.executable, str(RECIPES / "learning_study.py"), "--output", str(tmp_path / "out"), *small, *cells]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def study(*options: str) -> str:
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=800, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    printed = study("--clock_seeds", "0")
    rewards = re.findall(r"^spelling-loglinear-d2-s0-lr\S+: step (\d) of 6, \d+ s, reward \d\.\d\d$", printed, re.M)
    assert rewards == list("123456")
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").iterdir()}
    assert len(files) == 4 and (tmp_path / "out" / "report.txt").read_text() in printed
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert all(one["end"]["done"] and one["steps"]["step"] == [1, 2, 3, 4, 5, 6] for one in results)
    stale = next(one for one in results if one["run"]["method"] == "loglinear")
    assert stale["steps"]["staleness_max"] == [0, 1, 2, 2, 2, 2]
    assert {"entropy", "clip_low", "w_max", "r_max", "rho_max", "ess", "wait"} <= stale["steps"].keys()
    assert (tmp_path / "out" / "learning_spelling.png").stat().st_size > 8_000

    study("--clock_seeds", "0")
    assert files == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").iterdir()}
