"""How options are read: with dashes or underscores, once, as lists, and with the home folder for `~`."""

from pathlib import Path

import pytest

from tests.test_cli import OWN, refused
from trl_a3po.cli import plan
from trl_a3po.cli.main import _parser, main
from trl_a3po.cli.options import SettingsError, subject_and_options
from trl_a3po.cli.recipe import find_function
from trl_a3po.cli.train import make_parser, parse_command


def refused_with(capsys, *arguments) -> str:
    """The sentence with which a command other than `train` ends."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("trl-a3po") and len(error.splitlines()) == 1
    return error


def actions_of(parser) -> list:
    found = list(parser._actions)
    for commands in (action.choices for action in found if isinstance(action.choices, dict)):
        found += [action for command in commands.values() for action in actions_of(command)]
    return found


# --- spelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", [make_parser, plan.make_parser, _parser], ids=["train", "plan", "others"])
def test_every_option_can_be_written_with_dashes(parser):
    for action in actions_of(parser()):
        long = {option for option in action.option_strings if option.startswith("--")}
        assert {option.replace("_", "-") for option in long} <= long


def test_a_plan_takes_a_rate_that_is_written_with_dashes():
    parsed = plan.make_parser().parse_args(["--publish-seconds", "0.5", "--engine-speed", "8:400"])
    assert parsed.publish_seconds == 0.5 and parsed.engine_speed == ["8:400"]


def test_an_option_that_is_written_with_dashes_is_named_so():
    with pytest.raises(SettingsError, match=r"^--publish-seconds is 'x', but it must be"):
        plan.make_parser().parse_args(["--publish-seconds", "x"])


@pytest.mark.parametrize("arguments", ["{} --max_steps 2", "--config {} --max_steps 2", "--max_steps 2 --config={}"])
def test_a_recipe_comes_first_or_as_an_option(arguments):
    assert subject_and_options(arguments.format("a.yaml").split()) == ("a.yaml", ["--max_steps", "2"])


@pytest.mark.parametrize("arguments", ["a.yaml", "--config a.txt --max-steps 2", "--max_steps 2 --config=a.txt"])
def test_the_doctor_takes_a_recipe_as_train_does(tmp_path, monkeypatch, capsys, arguments):
    from trl_a3po.cli import doctor

    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "a.txt"):
        Path(name).write_text("max_steps: [")
    monkeypatch.setattr(doctor, "environment", lambda: "")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments.split()])
    assert ended.value.code == 1 and "is not YAML" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "give a recipe"),
        ("--config", "--config: expected one argument"),
        ("--config nowhere.yaml", "there is no recipe 'nowhere.yaml'"),
        ("a.yaml --config b.yaml", "there are several recipes, a.yaml, b.yaml: give one."),
    ],
)
def test_the_doctor_says_what_is_missing(capsys, arguments, words):
    assert words in refused_with(capsys, "doctor", *arguments.split())


# --- given twice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("plan --config a.yaml --config b.yaml", "--config"),
        ("plan --config=a.yaml --config=b.yaml", "--config"),
        ("plan --publish_seconds 1 --publish-seconds 2", "--publish-seconds"),
        ("plan --engine_speed 8:9 --engine_speed 9:9", "--engine_speed"),
        ("plot run --output a.png --output b.png", "--output"),
        ("report run --output a.html --output=b.html", "--output"),
    ],
)
def test_an_option_of_one_value_that_is_given_twice_is_refused(capsys, arguments, option):
    assert f"{option} is given twice, but only one of them could count" in refused_with(capsys, *arguments.split())


def test_an_option_that_collects_and_a_flag_may_be_repeated():
    parsed = plan.make_parser().parse_args(["--run", "a", "--run", "b", "--json", "--json"])
    assert parsed.run == [Path("a"), Path("b")] and parsed.json


def test_a_setting_of_a_recipe_is_overridden_by_the_last_option():
    """Launch scripts append what their caller gives."""
    assert parse_command(["--max_steps", "3", "--max-steps", "2", "--use_cpu", "true"])[1].max_steps == 2


# --- lists ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--report_to wandb tensorboard", ["wandb", "tensorboard"]),
        ("--report-to tensorboard --use_cpu", ["tensorboard"]),
        ("--report_to none", []),
    ],
)
def test_trackers_may_be_a_list(given, kept):
    assert parse_command([*given.split(), "--use_cpu", "true"])[1].report_to == kept


def test_one_value_of_a_setting_that_may_be_a_list_is_text():
    assert parse_command(["--optim_target_modules", "all-linear", "--use_cpu"])[1].optim_target_modules == "all-linear"


def test_a_recipe_may_hold_a_list_of_trackers(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("report_to: [wandb, tensorboard]\nuse_cpu: true\n")
    assert parse_command([str(recipe)])[1].report_to == ["wandb", "tensorboard"]


# --- the home folder ------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("in_recipe", [True, False])
def test_a_model_and_a_dataset_may_be_in_the_home_folder(home, in_recipe):
    (home / "a.yaml").write_text("model_name_or_path: ~/model\ndataset_name: ~/data\nuse_cpu: true\n")
    options = ["--model_name_or_path=~/model", "--dataset_name=~/data", "--use_cpu", "true"]
    script_args, _, model_args, _ = parse_command(["~/a.yaml"] if in_recipe else options)
    assert (script_args.dataset_name, model_args.model_name_or_path) == (f"{home}/data", f"{home}/model")


def test_the_name_of_a_hub_stays_as_it_is():
    script_args, _, model_args, _ = parse_command(
        ["--model_name_or_path", "a/b", "--dataset_name", "c/d", "--use_cpu"]
    )
    assert (script_args.dataset_name, model_args.model_name_or_path) == ("c/d", "a/b")


@pytest.mark.parametrize("given", [["~/a.yaml"], ["--config", "~/a.yaml"], ["--config=~/a.yaml"]])
def test_a_recipe_may_be_in_the_home_folder(home, given):
    (home / "a.yaml").write_text("max_steps: 7\nuse_cpu: true\n")
    _, args, _, folders = parse_command(given)
    assert args.max_steps == 7 and folders[0] == home


def test_a_function_may_be_in_the_home_folder(home, tmp_path):
    (home / "own.py").write_text(OWN)
    assert find_function("~/own.py:rows", "dataset_function", [Path("elsewhere")]).__name__ == "rows"


def test_what_is_planned_may_be_in_the_home_folder(home):
    parsed = plan.make_parser().parse_args(["--run=~/a", "--run=~/b", "--config=~/r.yaml", "--model=~/m"])
    assert parsed.run == [home / "a", home / "b"]
    assert (parsed.config, parsed.model) == (home / "r.yaml", str(home / "m"))


@pytest.mark.parametrize("command", ["watch", "plot", "report"])
def test_a_run_may_be_in_the_home_folder(home, command):
    parsed, _ = _parser().parse_known_args([command, "~/run"])
    assert (parsed.watched if command == "watch" else parsed.runs[0]) == home / "run"


def test_the_doctor_looks_into_the_home_folder(home, capsys):
    (home / "run.log").write_text("")
    with pytest.raises(SystemExit):
        main(["doctor", "~/run.log"])
    assert "the log is empty" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fsdp_config", "accelerator_config"])
def test_a_file_of_settings_may_be_in_the_home_folder(home, name):
    (home / "settings.json").write_text("{}")
    assert parse_command([f"--{name}=~/settings.json", "--use_cpu", "true"])


def test_a_user_who_is_not_there_has_no_home_folder():
    assert "there is no recipe '~nobody-of-this-name/x.yaml'" in refused("train", "~nobody-of-this-name/x.yaml")
