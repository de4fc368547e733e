"""A model or a dataset that is not there: one sentence that names the setting and its value."""

import pytest

from tests.test_cli import OWN, RECIPE, refused
from trl_a3po.cli import train
from trl_a3po.cli.smoke import save_smoke_model


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_smoke_model(tmp_path / "model")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "empty").mkdir()
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=tmp_path / "model", output=tmp_path / "out") + "use_cpu: true\n")
    return path


GONE = "but there is no such file or folder: correct the path."
NOT_HAD = "which is no folder here and cannot be had from the hub ("
NOT_LOADED = "which is there but cannot be loaded ("
NAMES = [
    ("./nowhere", GONE), ("{folder}/nowhere", GONE), ("~/nowhere", GONE), ("no/such", NOT_HAD), ("nosuch", NOT_HAD),
    ("empty", NOT_LOADED), ("{folder}/empty", NOT_LOADED),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words"), NAMES)
def test_a_model_that_is_not_there_is_named(recipe, monkeypatch, name, words):
    monkeypatch.setenv("HOME", str(recipe.parent))
    name = name.format(folder=recipe.parent)
    expanded = name.replace("~", str(recipe.parent))
    assert f"model_name_or_path is {expanded!r}, {words}" in refused("train", recipe, f"--model_name_or_path={name}")


@pytest.mark.parametrize(("name", "words"), NAMES)
def test_a_dataset_that_is_not_there_is_named(recipe, monkeypatch, name, words):
    monkeypatch.setenv("HOME", str(recipe.parent))
    recipe.write_text(recipe.read_text().replace("dataset_function: own.py:rows\n", ""))
    name = name.format(folder=recipe.parent)
    expanded = name.replace("~", str(recipe.parent))
    assert f"dataset_name is {expanded!r}, {words}" in refused("train", recipe, f"--dataset_name={name}")


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), PermissionError(13, "denied"), ConnectionError("of a tracker"),
     ValueError("num_generations"), RuntimeError("of CUDA")],
    ids=repr,
)  # fmt: skip
def test_another_error_while_the_trainer_is_built_is_not_taken_for_a_missing_model(recipe, monkeypatch, error):
    def fails(*arguments, **settings):
        raise error

    monkeypatch.setattr(train, "A3POTrainer", fails)
    with pytest.raises(type(error)) as raised:
        train.run([str(recipe)])
    assert raised.value is error


def test_another_error_of_a_dataset_is_not_taken_for_a_missing_one(recipe):
    from datasets.exceptions import DatasetGenerationError

    recipe.write_text(recipe.read_text().replace("dataset_function: own.py:rows\n", ""))
    (recipe.parent / "empty" / "rows.json").write_text("{")
    with pytest.raises(DatasetGenerationError):
        train.run([str(recipe), "--dataset_name", "./empty"])


def test_what_the_trainer_refuses_is_one_sentence(recipe):
    recipe.write_text(recipe.read_text().replace("dataset_function: own.py:rows\n", ""))
    (recipe.parent / "empty" / "rows.json").write_text('{"question": "1 + 1"}')
    assert "prompt" in refused("train", recipe, "--dataset_name", "./empty")


@pytest.mark.parametrize("value", ["nowhere", "true"])
def test_a_checkpoint_that_is_not_there_is_named(recipe, value):
    assert "resume_from_checkpoint=" in refused("train", recipe, "--resume_from_checkpoint", value)
