"""The command line: functions of one's own, what a bug report needs, pictures of runs, refusals in a sentence."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from tests.report.test_plot import history
from trl_a3po.cli.main import main, run_names
from trl_a3po.cli.recipe import find_function, find_rewards
from trl_a3po.cli.smoke import save_smoke_model
from trl_a3po.cli.train import run
from trl_a3po.report.history import read_history
from trl_a3po.report.plot_runs import COLOURS, runs_figure

OWN = """
from datasets import Dataset

WORTH = {"even": 1.0}


def rows():
    return Dataset.from_list([{"prompt": f"What is {i} + 1 ?", "number": i} for i in range(8)])


def even_tokens(completion_ids, number, **kwargs):
    assert len(number) == len(completion_ids)
    return [WORTH["even"] * sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
"""
RECIPE = """
model_name_or_path: {model}
dataset_function: own.py:rows
reward_funcs: [own.py:even_tokens]
reward_workers: 1
num_generations: 4
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
max_completion_length: 6
max_steps: 5
logging_steps: 1
save_strategy: "no"
report_to: none
output_dir: {output}
"""


def run_history(steps: int, **changes):
    more = {f"a3po/{name}/{end}": value for name in "wr" for end, value in (("min", 0.5), ("max", 2.0))}
    more |= {"a3po/staleness/min": 0, "a3po/staleness/max": 3}
    return history(steps, **more, **changes)


# --- train ----------------------------------------------------------------------------------------------------------


def test_a_recipe_with_functions_of_its_own_is_trained_and_the_command_line_wins(tmp_path):
    save_smoke_model(tmp_path / "model")
    (tmp_path / "own.py").write_text(OWN)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=tmp_path / "model", output=tmp_path / "out"))
    trainer = run([str(recipe), "--max_steps", "2"])
    assert trainer.state.global_step == 2
    steps = [entry for entry in read_history(tmp_path / "out") if "rewards/even_tokens/mean" in entry]
    assert len(steps) == 2 and steps[0]["rewards/even_tokens/mean"] > 0


@pytest.mark.long
def test_a_run_goes_on_from_its_last_checkpoint(tmp_path):
    save_smoke_model(tmp_path / "model")
    (tmp_path / "own.py").write_text(OWN)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=tmp_path / "model", output=tmp_path / "out"))
    run([str(recipe), "--max_steps", "2", "--save_strategy", "steps", "--save_steps", "2"])
    trainer = run([str(recipe), "--max_steps", "3", "--resume_from_checkpoint", "true"])
    assert [entry["step"] for entry in trainer.state.log_history if "reward" in entry] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset_function": "own.py:nothing"}, "has no function 'nothing'"),
        ({"dataset_function": "missing.py:rows"}, "no 'missing.py' in"),
        ({"dataset_function": None}, "set exactly one of the two"),
        ({"reward_funcs": None}, "reward_funcs is empty"),
        ({"reward_funcs": "even_tokens"}, "'file.py:function'"),
        ({"load_in_4bit": "true"}, "without use_peft"),
        ({"model_name_or_path": None}, "model_name_or_path is not set"),
        ({"max_stalness": "1"}, "there is no setting 'max_stalness'; is it 'max_staleness'"),
        ({"schedule": "asinc"}, "schedule='asinc'"),
    ],
)
def test_what_cannot_run_is_refused_before_a_model_is_loaded(tmp_path, changes, words):
    (tmp_path / "own.py").write_text(OWN)
    lines = {"model_name_or_path": "no/such-model", "dataset_function": "own.py:rows", "output_dir": str(tmp_path)}
    lines |= {"reward_funcs": "own.py:even_tokens", "num_generations": "4", **changes}
    recipe = tmp_path / "recipe.yaml"
    as_list = {"reward_funcs"}
    recipe.write_text(
        "\n".join(f"{k}: [{v}]" if k in as_list else f"{k}: {v}" for k, v in lines.items() if v is not None)
    )
    with pytest.raises(ValueError, match=words):
        run([str(recipe)])


def test_a_recipe_that_does_not_exist_is_named():
    with pytest.raises(SystemExit, match=r"no recipe 'nowhere\.yaml'"):
        main(["train", "nowhere.yaml"])


def test_functions_are_found_beside_the_recipe_first_and_by_module(tmp_path):
    for folder, value in (("first", 1), ("second", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.py").write_text(f"def value():\n    return {value}\n")
    folders = [tmp_path / "first", tmp_path / "second"]
    assert find_function("part.py:value", "dataset_function", folders)() == 1
    assert find_function("part.py:value", "dataset_function", folders[::-1])() == 2
    assert find_function("math.sqrt", "reward_funcs", [])(4) == 2
    with pytest.raises(ValueError, match="no module 'nowhere_at_all'"):
        find_function("nowhere_at_all.score", "reward_funcs", [])


def test_rewards_of_trl_are_known_by_name():
    from trl.rewards import think_format_reward

    assert find_rewards(["think_format_reward"], []) == [think_format_reward]


# --- env ------------------------------------------------------------------------------------------------------------


def test_env_says_what_a_bug_report_needs():
    printed = subprocess.run(
        [sys.executable, "-m", "trl_a3po", "env"], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    facts = dict(line.split(": ", 1) for line in printed.strip().splitlines())
    assert {"trl-a3po", "Python", "platform", "trl", "transformers", "torch", "peft", "vllm"} <= facts.keys()
    assert any(name == "accelerator" or name.startswith("cuda:") for name in facts)
    assert str(Path.home()) not in printed


# --- plot -----------------------------------------------------------------------------------------------------------


def write_run(folder: Path, entries) -> Path:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    return folder


@pytest.mark.parametrize("number", [1, 3])
def test_plot_draws_one_run_or_several(tmp_path, capsys, number):
    runs = [write_run(tmp_path / f"run{i}", run_history(5 + 10 * i)) for i in range(number)]
    main(["plot", *map(str, runs), "--output", str(tmp_path / "new" / "all.png")])
    assert imread(tmp_path / "new" / "all.png").std() > 0.05
    assert "run0" in capsys.readouterr().out


def test_each_run_has_its_line_in_its_colour():
    figure = runs_figure([("a", run_history(10)), ("b", run_history(20, reward=0.25))])
    reward = next(axes for axes in figure.axes if axes.get_title(loc="left") == "Reward")
    lines = [line for line in reward.lines if line.get_linestyle() == "-" and len(line.get_xdata())]
    assert [line.get_color() for line in lines] == list(COLOURS[:2])
    np.testing.assert_allclose(lines[1].get_ydata(), 0.25)


def test_the_bars_of_a_run_add_up_to_its_step_time():
    figure = runs_figure([("a", run_history(10)), ("b", run_history(10, step_time=6.0))])
    bars = next(axes for axes in figure.axes if axes.get_title(loc="left") == "Seconds a step").patches
    widths = np.array([bar.get_width() for bar in bars]).reshape(2, 3)
    np.testing.assert_allclose(widths, [[2.5, 0.5, 1.0], [4.5, 0.5, 1.0]])


def test_the_labels_of_runs_that_end_alike_stay_within_their_panel():
    alike = [{"a3po/staleness/mean": 1.5 + run / 100} for run in range(4)]
    figure = runs_figure([(name, run_history(10, **changes)) for name, changes in zip("abcd", alike, strict=True)])
    staleness = next(axes for axes in figure.axes if axes.get_title(loc="left") == "Staleness")
    heights = [text.xy[1] for text in staleness.texts if text.get_text().replace(".", "").isdigit()]
    assert len(heights) == 4 and all(0 <= height <= staleness.get_ylim()[1] for height in heights)


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (["a/one", "a/two"], ["one", "two"]),
        (["a/run", "b/run"], ["a/run", "b/run"]),
        (["x/a/run", "y/a/run", "z/other"], ["x/a/run", "y/a/run", "other"]),
        (["a/run/trainer_state.json", "b/run"], ["a/run", "b/run"]),
        (["a/run", "a/run"], ["run (1)", "run (2)"]),
        (["run", "a/run"], ["{root}/run", "a/run"]),
    ],
)
def test_runs_of_one_name_are_told_apart_by_the_folders_above(tmp_path, runs, names):
    for run_path in runs:
        folder = tmp_path / run_path.removesuffix("/trainer_state.json")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trainer_state.json").touch()
    assert run_names([tmp_path / name for name in runs]) == [name.format(root=tmp_path.name) for name in names]


def test_ratios_very_near_1_are_written_out():
    near = {f"a3po/{name}/{end}": value for name in "wr" for end, value in (("min", 1 - 1e-5), ("max", 1 + 1e-5))}
    figure = runs_figure([("a", [{**entry, **near} for entry in run_history(5)[:-1]])])
    figure.draw_without_rendering()
    assert {axes.yaxis.get_offset_text().get_text() for axes in figure.axes} == {""}


def test_a_run_without_a_panels_numbers_is_named_there():
    figure = runs_figure([("full", run_history(5)), ("grpo", [{"step": 1, "reward": 0.5}])])
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert sum("not logged by grpo" in word for word in words) == 4


def test_runs_that_cannot_be_drawn_are_refused_in_a_sentence(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text("{}")
    nothing = write_run(tmp_path / "nothing", [{"step": 1}])
    for run_path, words in (("empty", "no trainer_state.json"), ("other.json", "no log_history"), (nothing, "No run")):
        with pytest.raises(SystemExit) as ended:
            main(["plot", str(tmp_path / run_path), "--output", str(tmp_path / "x.png")])
        assert ended.value.code == 2 and words in capsys.readouterr().err


def test_of_a_run_that_was_stopped_the_newest_checkpoint_is_read(tmp_path):
    for step in (9, 10):
        write_run(tmp_path / f"checkpoint-{step}", [{"step": step}])
    assert read_history(tmp_path) == [{"step": 10}]


def test_folders_that_only_resemble_checkpoints_are_passed_over(tmp_path):
    for name, step in (("checkpoint-9", 9), ("checkpoint-10", 10), ("checkpoint-11.bak", 11), ("checkpoint-best", 12)):
        write_run(tmp_path / name, [{"step": step}])
    assert read_history(tmp_path) == [{"step": 10}]


def test_a_picture_without_a_suffix_is_the_png_that_plot_names(tmp_path, capsys):
    run_path = write_run(tmp_path / "run", run_history(5))
    main(["plot", str(run_path), "--output", str(tmp_path / "v1_picture")])
    assert str(tmp_path / "v1_picture.png") in capsys.readouterr().out
    assert imread(tmp_path / "v1_picture.png").std() > 0.05


def test_a_folder_is_no_picture_and_nothing_is_written_beside_it(tmp_path, capsys):
    run_path = write_run(tmp_path / "run", run_history(5))
    (tmp_path / "pictures").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["plot", str(run_path), "--output", str(tmp_path / "pictures")])
    assert ended.value.code == 2 and "pictures is a folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures", "run"]
