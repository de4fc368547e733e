"""When one process fails, all end, soon and with the cause; the last checkpoint goes on."""

import json
import signal

import pytest

from tests.distributed.failing import FAILS_AT, STEPS
from tests.distributed.launch import launch
from tests.tiny import save_tiny_model
from trl_a3po.checkpoints.checkpoint import checkpoints, why_invalid

pytestmark = pytest.mark.timeout(900)
MODULE = "tests.distributed.failing"


@pytest.mark.parametrize(
    ("mode", "fault", "cause"),
    [
        pytest.param("ddp", "kill", "process 1 of 2 has died or hangs", marks=pytest.mark.long),
        pytest.param("ddp", "raise", "ZeroDivisionError: a callback of process 1", marks=pytest.mark.long),
        pytest.param("ddp", "starve", "RewardError|StallError", marks=pytest.mark.long),
        # An error is passed on in the same way, whatever spreads the training.
        pytest.param("zero3", "raise", "ZeroDivisionError: a callback of process 1", marks=pytest.mark.slow),
        pytest.param("zero3", "publish", "EngineError: The engine died while it took", marks=pytest.mark.long),
        pytest.param("zero3", "nan", "CheckpointError: The checkpoint", marks=pytest.mark.long),
    ],
)
def test_every_process_ends_with_the_cause_and_the_checkpoint_goes_on(tmp_path, mode, fault, cause):
    if mode == "zero3":
        pytest.importorskip("deepspeed")
    save_tiny_model(tmp_path / "model")
    failed = launch(MODULE, tmp_path, mode, fault)
    assert failed.returncode == -signal.SIGKILL if fault == "kill" else failed.returncode != 0
    assert any(word in failed.stdout for word in cause.split("|")), failed.stdout[-4000:]
    assert (tmp_path / "run" / f"checkpoint-{FAILS_AT - 1}" / "a3po_complete.json").is_file()
    if fault == "nan":  # which one process alone has seen
        refusals = [(tmp_path / f"refused-{rank}").read_text() for rank in range(2)]
        assert all(f"checkpoint-{FAILS_AT} is not written, because weights are not" in text for text in refusals)
        assert not (tmp_path / "run" / f"checkpoint-{FAILS_AT}").exists()

    resumed = launch(MODULE, tmp_path, mode, "nothing")
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    result = json.loads((tmp_path / "resumed.json").read_text())
    assert result["step"] == STEPS and result["published"][0] in (FAILS_AT - 1, FAILS_AT)


@pytest.mark.long
def test_a_reward_function_that_gathers_is_refused_at_the_call_in_one_sentence(tmp_path):
    save_tiny_model(tmp_path / "model")
    failed = launch(MODULE, tmp_path, "ddp", "gather")
    assert failed.returncode != 0
    sentence = (
        "RewardError: The reward function 'reward' calls an operation of accelerate across processes, which waits for "
        "every process of the run, but only one of them calls reward functions. Compute the reward from the group's"
    )
    assert sentence in failed.stdout and "StallError" not in failed.stdout, failed.stdout[-4000:]


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        pytest.param("ddp", "terminate", marks=pytest.mark.slow),  # as with zero3
        pytest.param("ddp", "terminate the launcher", marks=pytest.mark.long),
        pytest.param("zero3", "terminate", marks=pytest.mark.long),
    ],
)
def test_one_process_that_receives_sigterm_ends_all_at_a_step_that_goes_on(tmp_path, mode, fault):
    if mode == "zero3":
        pytest.importorskip("deepspeed")
    save_tiny_model(tmp_path / "model")
    ended = launch(MODULE, tmp_path, mode, fault, torchrun=fault == "terminate the launcher")
    assert ended.returncode != 0
    assert "SIGTERM ended the run after optimizer step" in ended.stdout, ended.stdout[-4000:]
    [folder] = checkpoints(tmp_path / "run")
    assert why_invalid(folder) is None
    if fault == "terminate":  # only process 1 received it, so that the main process did not stop waiting
        assert ended.returncode == 75
        assert folder.name == f"checkpoint-{FAILS_AT + 1}"

    resumed = launch(MODULE, tmp_path, mode, "nothing")
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    assert json.loads((tmp_path / "resumed.json").read_text())["step"] == STEPS
