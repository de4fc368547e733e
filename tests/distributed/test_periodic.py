"""`schedule="periodic"` in two processes trains what `schedule="sync"` trains in one, on the same completions."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import launch
from tests.tiny import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("periodic")
    save_tiny_model(folder / "model")
    done = launch("tests.distributed.runs", folder, "one", "sync", "sync-kl", processes=1)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


def assert_same(found, expected):
    for path in expected.glob("*model.safetensors"):
        ours = load_file(found / path.name)
        for key, weight in load_file(path).items():
            torch.testing.assert_close(ours[key].float(), weight.float(), rtol=1e-5, atol=1e-5, msg=key)
    ours, theirs = (json.loads((run / "log.json").read_text()) for run in (found, expected))
    for name in ("loss", "grad_norm", "reward"):
        logged = [[entry[name] for entry in log["history"] if name in entry] for log in (ours, theirs)]
        assert len(logged[0]) == 3 and logged[0] == pytest.approx(logged[1], rel=1e-3, abs=1e-5), name
    assert ours["published"] == theirs["published"]


def test_two_processes_train_what_one_trains_in_sync(folder):
    done = launch("tests.distributed.runs", folder, "ddp", "periodic", "periodic-kl")
    assert done.returncode == 0, done.stdout[-6000:]
    assert_same(folder / "ddp" / "periodic", folder / "one" / "sync")
    assert_same(folder / "ddp" / "periodic-kl", folder / "one" / "sync-kl")


def test_zero_trains_it_too_and_refuses_the_losses_that_scale_gradients(folder):
    pytest.importorskip("deepspeed")
    done = launch("tests.distributed.runs", folder, "zero2", "periodic-kl", "periodic")
    assert "set loss_type='dr_grpo' or 'grpo'" in done.stdout, done.stdout[-6000:]
    assert_same(folder / "zero2" / "periodic-kl", folder / "one" / "sync-kl")
