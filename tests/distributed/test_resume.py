"""Two processes go on in the middle of a generation batch, each with its own rows of it; between two batches, and
where nothing lies spread over them, any number of processes does."""

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import runs
from tests.distributed.launch import launch
from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    save_tiny_model(folder / "model")
    done = launch("tests.distributed.resumed", folder, "ddp")
    assert done.returncode == 0, done.stdout[-6000:]
    return folder


def test_the_weights_are_those_of_a_run_that_was_not_stopped(folder):
    whole, resumed = (load_file(folder / name / "model.safetensors") for name in ("whole", "resumed"))
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=0, msg=name)


def test_every_process_saved_its_rows(folder):
    names = {path.name for path in (folder / "run" / "checkpoint-1").glob("a3po_batch_*")}
    assert names == {"a3po_batch_0.safetensors", "a3po_batch_1.safetensors"}
    assert not list((folder / "run" / "checkpoint-2").glob("a3po_batch_*"))


def test_one_process_cannot_go_on_in_the_middle_of_a_batch_that_two_shared(folder):
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}
    trainer = runs.build(folder, "one", 1, per_device_train_batch_size=4, **settings)
    with pytest.raises(ValueError, match="that 2 processes shared, and 1 processes cannot resume it: launch 2"):
        trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-1"))


def test_between_batches_another_number_of_processes_goes_on(tmp_path):
    """Two train two steps, one the third, and two again the fourth: as if two had trained all of them."""
    save_tiny_model(tmp_path / "model")
    module = "tests.distributed.resized"
    for processes, *arguments in (
        (2, "ddp", "two"),
        (1, "one", "one", "two/checkpoint-2"),
        (2, "ddp", "again", "one/checkpoint-3"),
    ):
        done = launch(module, tmp_path, *arguments, processes=processes)
        assert done.returncode == 0, done.stdout[-6000:]
    expected = load_file(tmp_path / "two" / "model" / "model.safetensors")
    for name in ("one", "again"):
        for key, weight in load_file(tmp_path / name / "model" / "model.safetensors").items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-5, msg=f"{name}: {key}")


@pytest.mark.slow
def test_another_number_of_processes_is_refused_under_deepspeed(tmp_path):
    pytest.importorskip("deepspeed")
    save_tiny_model(tmp_path / "model")
    assert launch("tests.distributed.resized", tmp_path, "zero2", "two").returncode == 0
    done = launch("tests.distributed.resized", tmp_path, "zero2", "one", "two/checkpoint-2", processes=1)
    assert "saved under DeepSpeed by 2 processes" in done.stdout, done.stdout[-6000:]
    assert "launch 2 processes, or start a new run from its weights" in done.stdout
