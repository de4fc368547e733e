"""Two processes go on in the middle of a generation batch, each with its own rows of it."""

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import launch
from tests.tiny import save_tiny_model


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
