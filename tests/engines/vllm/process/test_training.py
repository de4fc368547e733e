"""Training with vLLM in a process of the trainer: the delivery check passes, and a worker that dies is replaced."""

import os
import signal
import sys

import pytest
import torch
from transformers import TrainerCallback

from tests.engines.vllm import stubbed
from tests.engines.vllm.real_runs import trainer_of
from tests.engines.vllm.real_vllm import vllm_python
from tests.engines.vllm.stubbed import stub_vllm_on_path
from tests.runs import build, logged
from tests.tiny import save_tiny_model
from tests.workers.processes import is_gone, until
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.engines.vllm.process.vllm_engine import VLLMEngine
from trl_a3po.errors import EngineError
from trl_a3po.publish.collect import policy_spec

SETTINGS = {"engine": "vllm", "engine_threads": 1, "engine_slots": 8}


def test_trls_colocated_vllm_trains_and_passes_the_delivery_check(tmp_path):
    with stub_vllm_on_path():
        colocated = {"engine": "transformers", "use_vllm": True, "vllm_mode": "colocate", "engine_threads": 1}
        trainer = build(save_tiny_model(tmp_path / "model"), tmp_path, **colocated, delivery_check_steps=1)
        trainer.train()
    assert max(logged(trainer, "a3po/delivery/gap")) < 1e-4


def test_an_interpreter_without_vllm_is_reported_with_the_ways_out():
    model = stubbed.policy(lora=False)
    engine = VLLMEngine(slots=1, python=None)
    with pytest.raises(EngineError, match="set vllm_python"):
        engine.start(policy_spec(model, torch.float32), stubbed.SAMPLING, stubbed.update(False, 0, complete=True))
    engine.close()


def test_a_version_of_vllm_that_cannot_be_driven_is_named(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.21.3'")
    monkeypatch.syspath_prepend(tmp_path)
    model = stubbed.policy(lora=False)
    engine = VLLMEngine(slots=1, python=sys.executable)
    with pytest.raises(EngineError, match=r"vLLM 0\.22 to 0\.31 .* this one is 0\.21\.3"):
        engine.start(policy_spec(model, torch.float32), stubbed.SAMPLING, stubbed.update(False, 0, complete=True))


@pytest.mark.parametrize("own", [True, False], ids=["beside the trainer", "elsewhere"])
def test_a_vllm_that_cannot_be_imported_is_one_sentence_that_names_the_setting(tmp_path, monkeypatch, own):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.12:\\n no such file')")
    python = sys.executable if own else interpreter(tmp_path, f'PYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"')
    monkeypatch.syspath_prepend(tmp_path)
    model = stubbed.policy(lora=False)
    engine = VLLMEngine(slots=1, python=python)
    words = (
        rf"^vllm_python={None if own else repr(python)} has a vLLM that cannot be imported \(ImportError: libcudart"
    )
    with pytest.raises(EngineError, match=words) as raised:
        engine.start(policy_spec(model, torch.float32), stubbed.SAMPLING, stubbed.update(False, 0, complete=True))
    assert str(raised.value).count("\n") == 0 and "set vllm_python to an interpreter" in str(raised.value)


def interpreter(folder, command: str) -> str:
    """A program that runs `command`."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f'exec "{sys.executable}" -S "$@"', r"is a Python without vLLM: install vllm there, or set vllm_python"),
        (
            "echo 'no such option: -P' >&2; exit 2",
            r"is no Python 3.11 or newer that works \(no such option: -P\): set",
        ),
        ("exit 0", r"is no Python 3.11 or newer that works \(it printed nothing\): set vllm_python"),
    ],
    ids=["without vLLM", "too old", "no Python"],
)
def test_an_interpreter_that_cannot_have_vllm_is_refused_before_a_model_is_loaded(tmp_path, command, words):
    python = interpreter(tmp_path, command)
    args = A3POConfig(str(tmp_path), engine="vllm", vllm_python=python, use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=rf"^vllm_python='{python}' {words}"):
        A3POTrainer("no/such/model", lambda **kwargs: [], args=args)


# --- on a real vLLM -------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(True, id="adapter", marks=pytest.mark.slow),  # test_versions.py has one that is not started again
        pytest.param(False, id="whole, tied"),
    ],
)
def test_a_real_vllm_stamps_every_token_with_its_version_and_is_started_again(tmp_path, lora):
    model = save_tiny_model(tmp_path / "model", head_dim=64, tie_word_embeddings=not lora)
    settings = SETTINGS | {"vllm_python": vllm_python(), "max_steps": 4, "kv_on_publish": "recompute"}
    trainer = trainer_of(model, tmp_path, lora, **settings)
    killed = []

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                engine = trainer._session.engine
                assert isinstance(engine, VLLMEngine)
                killed.append(engine.worker_pid)
                os.kill(killed[0], signal.SIGKILL)

    trainer.add_callback(Kill())
    trainer.train()
    assert trainer.state.global_step == 4 and max(trainer.own) < 1e-3
    gaps = [entry["a3po/delivery/gap"] for entry in trainer.state.log_history if "a3po/delivery/gap" in entry]
    assert gaps and max(gaps) < 1e-3
    until(lambda: is_gone(killed[0]))
