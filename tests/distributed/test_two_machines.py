"""Two machines, each with a launcher of its own. Both are this one here, but find each other as two would."""

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import launch, launch_machines
from tests.tiny import save_tiny_model

RUNS = "tests.distributed.runs"
FAILING = "tests.distributed.failing"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machines")
    save_tiny_model(folder / "model")
    done = launch(RUNS, folder, "one", "full", "lora", processes=1)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


def assert_same_weights(folder, mode, name):
    (path,) = (folder / "one" / name).glob("*model.safetensors")
    trained = load_file(folder / mode / name / path.name)
    for key, weight in load_file(path).items():
        torch.testing.assert_close(trained[key].float(), weight.float(), rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    "processes", [pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.slow)]
)
def test_they_train_what_one_process_trains(folder, processes):
    for machine in launch_machines(RUNS, folder, "ddp", "full", "lora", processes=processes):
        assert machine.returncode == 0, machine.stdout[-6000:]
    for name in ("full", "lora"):
        assert_same_weights(folder, "ddp", name)


@pytest.mark.slow
def test_they_train_under_zero3_too(folder):
    pytest.importorskip("deepspeed")
    for machine in launch_machines(RUNS, folder, "launched", "full", config="zero3"):
        assert machine.returncode == 0, machine.stdout[-6000:]
    assert_same_weights(folder, "launched", "full")


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        # As with two processes of one machine in test_failures.py: the error takes the same way.
        pytest.param("raise", ["ZeroDivisionError: a callback of process 1"] * 2, marks=pytest.mark.slow),
        ("kill", ["process 1 of 2 has died or hangs; see its own output", "Signal 9|SIGKILL"]),
    ],
)
def test_both_end_with_the_cause_when_a_process_of_one_fails(tmp_path, fault, causes):
    save_tiny_model(tmp_path / "model")
    failed = launch_machines(FAILING, tmp_path, "ddp", fault)
    for machine, cause in zip(failed, causes, strict=True):
        assert machine.returncode != 0
        assert any(words in machine.stdout for words in cause.split("|")), machine.stdout[-4000:]


@pytest.mark.long
def test_an_output_dir_that_they_do_not_share_is_refused_on_both(tmp_path):
    for machine in range(2):
        save_tiny_model(tmp_path / str(machine) / "model")
    for machine in launch_machines(FAILING, tmp_path / "{machine}", "ddp", "nothing"):
        assert machine.returncode != 0
        assert "set output_dir to a folder that all machines share" in machine.stdout, machine.stdout[-4000:]
