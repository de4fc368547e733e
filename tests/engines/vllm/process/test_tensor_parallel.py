"""One replica on several devices. What vLLM does with it is tested on its build for CPUs."""

import contextlib
import dataclasses
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from tests.engines.transformers.running import events_of
from tests.engines.vllm.process.test_versions import (
    FILTERED,
    ROUNDING,
    TEMPERATURE,
    policy,
    published_in_the_middle,
    published_with_kept_caches,
)
from tests.engines.vllm.real_vllm import vllm_python
from tests.workers.processes import TIMEOUT, is_gone, until
from trl_a3po.engines.vllm.process.vllm_engine import VLLMEngine, worker_variables
from trl_a3po.protocol.engine import GroupRequest
from trl_a3po.publish.collect import collect_weights, policy_spec
from trl_a3po.testing import completion_logps

SPREAD = {"other_devices": ["cpu"]}
SHORTER = dataclasses.replace(FILTERED, max_new_tokens=240)  # several processes on few cores take their time
PROMPT, COMPLETION = (5, 6, 7), (8, 9, 10, 11)


def test_a_worker_sees_the_gpus_of_its_replica(monkeypatch):
    devices = [torch.device("cuda", index) for index in (2, 3)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert worker_variables(devices, deterministic=False)["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert worker_variables(devices, deterministic=False)["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_attention_heads_that_cannot_be_shared_out_are_refused():
    model = policy(lora=False)  # with four heads
    engine = VLLMEngine(slots=1, python="python", other_devices=["cpu", "cpu"])
    with pytest.raises(ValueError, match=r"vllm_tensor_parallel_size=3 cannot hold.* 4 attention heads: set it to a"):
        engine.start(policy_spec(model, torch.float32), FILTERED, collect_weights(model, 0, complete=True))
    engine.close()


# --- on a real vLLM -------------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """The processes that `pid` and those that it started have started."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found += map(int, file.read_text().split())
    return found + [below for child in found for below in descendants(child)]


class Left:
    """What an engine has of the machine while it runs, and may not leave behind."""

    def __init__(self, engine):
        self.worker = engine.worker_pid
        self.processes = descendants(self.worker)
        self.ranks = [pid for pid in self.processes if b"tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in (self.worker, *self.ranks))
        self.shared = set(re.findall(r"/dev/shm/\S+$", maps, re.M))
        assert len(self.ranks) == 2 and self.shared

    def is_nothing(self) -> bool:
        return all(map(is_gone, (self.worker, *self.processes))) and not any(map(os.path.exists, self.shared))


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_whole_weights_reach_every_rank_and_nothing_is_left(monkeypatch):
    model, folder = policy(lora=False), tempfile.mkdtemp()  # a short path: vLLM's sockets lie below it
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
    with published_in_the_middle(model, SHORTER, python=vllm_python(), kv_on_publish="recompute", **SPREAD) as engine:
        logps, version = engine.score(PROMPT, COMPLETION, TIMEOUT)
        assert version == 1
        expected = completion_logps(model, PROMPT, COMPLETION, TEMPERATURE).tolist()
        assert logps == pytest.approx(expected, abs=ROUNDING)
        left = Left(engine)
    until(left.is_nothing)
    os.rmdir(folder)  # fails if a file is left


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_an_adapter_reaches_every_rank_and_a_worker_that_is_killed_leaves_no_rank():
    settings = {"python": vllm_python(), "kv_on_publish": "recompute", "max_restarts": 0, **SPREAD}
    with published_in_the_middle(policy(lora=True), SHORTER, **settings) as engine:
        left = Left(engine)
        for rank in left.ranks:
            os.kill(rank, signal.SIGTERM)  # which a job's processes are sent before they have to end
        engine.score(PROMPT, COMPLETION, TIMEOUT)
        os.kill(left.worker, signal.SIGKILL)
        until(left.is_nothing)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kept_caches_are_kept_in_every_rank_and_after_a_rank_was_killed_the_replica_is_started_again():
    with published_with_kept_caches(**SPREAD) as engine:
        left = Left(engine)
        os.kill(left.ranks[1], signal.SIGKILL)
        until(left.is_nothing)
        engine.submit([GroupRequest(9, 9, PROMPT, 2)])
        (event,) = events_of(engine, [9]).values()
        assert {version for rollout in event.rollouts for version in rollout.versions} == {1}
        assert engine.stats().restarts == 1
