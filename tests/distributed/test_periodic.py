"""`schedule="periodic"` in two processes trains what `schedule="sync"` trains in one, on the same completions."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.exact import RUNS, SEEDS
from tests.distributed.launch import launch
from tests.runs import assert_same_gradients
from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SLOW = pytest.mark.slow  # the other mode of the same test is held to the same numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("periodic")
    save_tiny_model(folder / "model")
    done = launch("tests.distributed.runs", folder, "one", "sync", "sync-kl", "sync-rows", processes=1)
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


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp2", marks=SLOW)])
def test_two_processes_train_what_one_trains_in_sync(folder, mode):
    done = launch("tests.distributed.runs", folder, mode, "periodic", "periodic-kl")
    assert done.returncode == 0, done.stdout[-6000:]
    assert_same(folder / mode / "periodic", folder / "one" / "sync")
    assert_same(folder / mode / "periodic-kl", folder / "one" / "sync-kl")


@pytest.mark.parametrize("mode", [pytest.param("zero2", marks=SLOW), "zero3"])
def test_zero_trains_it_too_and_refuses_the_losses_that_scale_gradients(folder, mode):
    pytest.importorskip("deepspeed")
    done = launch("tests.distributed.runs", folder, mode, "periodic-kl", "periodic-rows", "periodic")
    assert "set loss_type='dr_grpo' or 'grpo'" in done.stdout, done.stdout[-6000:]
    assert_same(folder / mode / "periodic-kl", folder / "one" / "sync-kl")
    assert_same(folder / mode / "periodic-rows", folder / "one" / "sync-rows")


@pytest.fixture(scope="module")
def exact(folder):
    for processes in (1, 2):
        done = launch("tests.distributed.exact", folder, processes=processes)
        assert done.returncode == 0, done.stdout[-6000:]
    return folder


@pytest.mark.parametrize("name", list(RUNS))
def test_in_float64_any_order_of_arrival_in_two_processes_gives_the_step_of_sync_in_one(exact, name):
    sync = torch.load(exact / f"{name}-sync-None.pt")
    found = [torch.load(exact / f"{name}-periodic-{seed}.pt") for seed in SEEDS]
    assert len({str(run["taken"]) for run in [sync, *found]}) == 1 + len(SEEDS)  # every order another one
    for run in found:
        assert_same_gradients(run["gradients"], sync["gradients"], rtol=0, atol=1e-10)
        for key, weight in sync["weights"].items():
            torch.testing.assert_close(run["weights"][key], weight, rtol=0, atol=1e-10, msg=key)
        assert min(run["norms"]) > 0.05  # clipped at every step
