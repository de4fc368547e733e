"""The command line: functions of one's own, what a bug report needs, pictures of runs, refusals in a sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from tests.report.test_plot import history
from trl_a3po.cli.main import _parser, main, run_names
from trl_a3po.cli.options import SettingsError
from trl_a3po.cli.recipe import find_function, find_rewards
from trl_a3po.cli.smoke import save_smoke_model
from trl_a3po.cli.train import make_parser, parse_command, run
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


def test_a_recipe_may_ask_for_a_smoke_run(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"smoke: true\nmodel_name_or_path: large\noutput_dir: {tmp_path}/out\nmax_steps: 500\n")
    asked, args, model, _ = parse_command([str(recipe), "--output_dir", str(tmp_path / "smoke")])
    by_option = parse_command(["--smoke", "--output_dir", str(tmp_path / "smoke")])
    assert asked.smoke and model.model_name_or_path == by_option[2].model_name_or_path != "large"
    assert args.max_steps == by_option[1].max_steps < 500


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


def refused(command, *arguments) -> str:
    """The sentence with which a command ends."""
    with pytest.raises(SystemExit) as ended:
        main([command, *map(str, arguments)])
    sentence = str(ended.value)
    assert sentence.startswith(f"trl-a3po {command}: ") and len(sentence.splitlines()) == 1
    return sentence


def test_a_recipe_that_does_not_exist_is_named():
    assert "there is no recipe 'nowhere.yaml'." in refused("train", "nowhere.yaml")
    assert "there is no recipe 'nowhere.yaml'." in refused("train", "--config", "nowhere.yaml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--max_stalenes 3", "there is no option '--max_stalenes'; is it '--max_staleness'?"),
        ("--max_stalenes=3", "there is no option '--max_stalenes'; is it '--max_staleness'?"),
        ("--max-stalenes 3", "there is no option '--max-stalenes'; is it '--max_staleness'?"),
        ("-max_staleness 3", "there is no option '-max_staleness'; is it '--max_staleness'?"),
        ("--proximal log --max_steps 2", "there is no option '--proximal'; is it '--proximal_method'?"),
        ("--num_generation 3", "there is no option '--num_generation'; is it '--num_generations'?"),
        ("--use_pef", "there is no option '--use_pef'; is it '--use_peft'?"),
        ("--xyzzy 1", "there is no option '--xyzzy'."),
        ("--max_steps 3 4", "'4' is neither an option nor the value of one: write --name value"),
        ("max_steps=3", "'max_steps=3' is neither an option nor the value of one: write --name value"),
        ("--config {recipe}", "several recipes"),
        ("--max_staleness three", "--max_staleness: invalid int value: 'three'"),
        ("--max_staleness", "--max_staleness: expected one argument"),
    ],
)
def test_an_option_that_is_none_is_refused_before_anything_is_built(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("model_name_or_path: no/such-model\nreward_funcs: [nowhere.py:f]\n")
    for smoke in ([], ["--smoke"]):
        options_of = options.format(recipe=tmp_path / "recipe.yaml").split()
        assert words in refused("train", tmp_path / "recipe.yaml", *options_of, *smoke)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_no_option_can_be_abbreviated():
    parser = make_parser()
    shorter = {option[:-1] for option in parser._option_string_actions if len(option) > 4}
    shorter -= parser._option_string_actions.keys()
    assert len(shorter) > 300
    assert parser.parse_known_args(sorted(shorter))[1] == sorted(shorter)


def test_what_is_accepted_on_purpose_is_no_typing_error(tmp_path, monkeypatch):
    monkeypatch.delenv("OF_A_RECIPE", raising=False)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_staleness: 1\nenv:\n  OF_A_RECIPE: yes it is\n")
    options = "--max-staleness 3 --no_gradient_checkpointing --use_cpu --use-peft true --reward_funcs a.py:f b.py:g"
    for first in ([str(recipe)], ["--config", str(recipe)], [f"--config={recipe}"]):
        script_args, args, model_args, folders = parse_command([*first, *options.split()])
        assert (args.max_staleness, args.gradient_checkpointing, model_args.use_peft) == (3, False, True)
        assert script_args.reward_funcs == ["a.py:f", "b.py:g"] and folders == [tmp_path, Path.cwd()]
    assert os.environ["OF_A_RECIPE"] == "yes it is"


@pytest.mark.parametrize("key", ["max_stalenes", "max-staleness", "help", "smok"])
def test_a_key_of_a_recipe_that_is_no_setting_is_named(tmp_path, key):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"num_generations: 3\n{key}: 3\n")  # 3 completions fill no batch, which is said later
    nearest = {"smok": "smoke", "max_stalenes": "max_staleness", "max-staleness": "max_staleness"}.get(key)
    assert f"there is no setting {key!r}" + (f"; is it {nearest!r}?" if nearest else ".") in refused("train", recipe)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("watch nowhere --onse", "there is no option '--onse'; is it '--once'?"),
        ("watch nowhere --onc", "there is no option '--onc'; is it '--once'?"),
        ("plot nowhere --out x.png", "there is no option '--out'; is it '--output'?"),
        ("report nowhere --output", "--output: expected one argument"),
        ("env now", "'now' is neither an option nor the value of one"),
        ("doctor . --once", "there is no option '--once'"),
    ],
)
def test_the_other_commands_refuse_what_is_no_option_too(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    printed = capsys.readouterr()
    assert ended.value.code == 2 and words in printed.out + printed.err


# --- functions that a recipe names ----------------------------------------------------------------------------------

MODULES = {
    "whole.py": "def score(**kwargs): ...\nWORTH = 1",
    "raises.py": "def third():\n    return 1 / 0\n\nthird()\n",
    "unfinished.py": "def score(:\n    pass\n",
    "exits.py": "import sys\nsys.exit('usage: exits.py FILE')\n",
    "lacks.py": "\nimport nowhere_at_all\n",
    "calls.py": "import json\njson.loads('{')\n",
    "imports.py": "import raises\n",
}
NOT_FOUND = [
    ("missing", "score", "was not found: there is no {place!r}", "was not found: there is no module 'missing'."),
    ("whole", "scores", "was not found: {folder}/whole.py has no function 'scores'.", None),
    ("whole", "WORTH", "was not found: {folder}/whole.py has no function 'WORTH'.", None),
    ("raises", "score", "it raises ZeroDivisionError: division by zero ({folder}/raises.py, line 2)", None),
    ("unfinished", "score", "it raises SyntaxError: invalid syntax ({folder}/unfinished.py, line 1)", None),
    ("exits", "score", "it raises SystemExit: usage: exits.py FILE ({folder}/exits.py, line 2)", None),
    ("lacks", "score", "No module named 'nowhere_at_all' ({folder}/lacks.py, line 2)", None),
    ("calls", "score", "({folder}/calls.py, line 2)", None),
    ("imports", "score", "it raises ZeroDivisionError: division by zero ({folder}/raises.py, line 2)", None),
]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder named like this package, and the current one, with one module for each kind of fault."""
    folder = tmp_path / "trl_a3po"
    folder.mkdir()
    for name, content in MODULES.items():
        (folder / name).write_text(content)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in MODULES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("setting", ["reward_funcs", "dataset_function"])
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(("module", "function", "words", "of_module"), NOT_FOUND)
def test_a_function_that_cannot_be_had_is_explained(modules, setting, in_file, module, function, words, of_module):
    name = f"{module}.py:{function}" if in_file else f"{module}.{function}"
    expected = words if in_file or of_module is None else of_module
    for _ in range(2):  # a module that raised is not taken for a whole one by the next name
        with pytest.raises(SettingsError) as refusal:
            find_function(name, setting, [modules])
        assert str(refusal.value).startswith(f"{setting}={name!r} ") and len(str(refusal.value).splitlines()) == 1
        assert expected.format(folder=modules, place=f"{module}.py") in str(refusal.value)


@pytest.mark.parametrize("name", ["score", "own.py:", ":score", "a..b", ".score", "own.py:a b", "own.py"])
def test_a_name_that_says_no_place_is_refused(tmp_path, name):
    with pytest.raises(SettingsError, match=r"does not say where|was not found|cannot be imported"):
        find_function(name, "reward_funcs", [tmp_path])


@pytest.mark.parametrize("smoke", [[], ["--smoke"]])
def test_a_reward_function_that_cannot_be_had_ends_the_command_in_a_sentence(modules, smoke):
    recipe = modules / "recipe.yaml"
    recipe.write_text("model_name_or_path: no/such-model\ndataset_name: no/such-data\nreward_funcs: whole.py:score\n")
    assert "reward_funcs='whole.py:score' is no list: write reward_funcs: ['whole.py:score']" in refused(
        "train", recipe
    )
    for name, words in (("nope.py:f", "there is no 'nope.py' in"), ("raises.py:f", "raises.py, line 2)")):
        assert words in refused("train", recipe, "--reward_funcs", name, "--output_dir", modules / "out", *smoke)


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


@pytest.mark.parametrize("command", ["report", "plot"])
def test_an_image_or_a_page_may_be_written_into_the_home_folder(monkeypatch, tmp_path, command):
    monkeypatch.setenv("HOME", str(tmp_path))
    parsed, _ = _parser().parse_known_args([command, "run", "--output=~/file"])
    assert parsed.output == tmp_path / "file"


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
