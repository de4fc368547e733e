"""Whole weights over CUDA IPC, on stub servers that take the tensors themselves for handles."""

import threading
from types import SimpleNamespace

import pytest
import torch

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import finished, requests, started, until, update
from tests.engines.vllm.test_training_on_stubs import At, check_groups, trainer_on
from trl_a3po.engines.vllm import ipc, weight_route
from trl_a3po.engines.vllm.ipc import IpcTransfer, is_here
from trl_a3po.errors import EngineError
from trl_a3po.rollout import queue

GPU = {"backend": "ipc"}


@pytest.fixture(autouse=True)
def tensors_for_handles(monkeypatch):
    """A transfer that stays on the CPU."""

    class OnTheCpu(IpcTransfer):
        def __init__(self, device):
            super().__init__(torch.device("cuda"))
            self._device = torch.device("cpu")

    monkeypatch.setattr(weight_route, "IpcTransfer", OnTheCpu)
    monkeypatch.setattr(ipc, "reduce_tensor", lambda tensor: (None, (tensor,)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))


def on_the_gpu(servers, tmp_path, **changes):
    return started(servers, tmp_path, trainer_device="cuda:0", **changes)


@pytest.mark.parametrize("kv_on_publish", ["keep", "recompute"])
def test_every_token_carries_the_version_it_was_sampled_from(tmp_path, kv_on_publish):
    servers = [StubServer(step=0.01, **GPU) for _ in range(2)]
    engine = on_the_gpu(servers, tmp_path, kv_on_publish=kv_on_publish)
    try:
        engine.submit(requests(6))
        for version, sampled in ((1, 20), (2, 60)):
            until(lambda sampled=sampled: sum(server.tokens for server in servers) > sampled)
            engine.publish(update(False, version))
        finished(engine, 6)
        assert engine.stats().extra["published_bytes"] == sum(t.nbytes for t in update(False, 0).tensors.values())
        assert not list(tmp_path.glob("engine-*/weights-*"))
    finally:
        engine.close()


def test_more_than_a_bucket_holds_travels_in_several(tmp_path, monkeypatch):
    monkeypatch.setattr(ipc, "BUCKET_BYTES", 1024)
    (server,) = servers = [StubServer(**GPU)]
    engine = on_the_gpu(servers, tmp_path)
    try:
        engine.submit(requests(1))
        finished(engine, 1)
        assert server.arrivals > 2
    finally:
        engine.close()


def test_a_server_on_another_gpu_is_named_with_the_way_out(tmp_path):
    with pytest.raises(EngineError, match=r"GPU UUID GPU-7.*vllm_weight_transfer='disk'"):
        on_the_gpu([StubServer(gpu="GPU-7", **GPU)], tmp_path)


def test_a_server_that_comes_back_gets_the_weights_with_the_next_publish(tmp_path):
    servers = [StubServer(step=0.01, **GPU) for _ in range(2)]
    engine = on_the_gpu(servers, tmp_path)
    try:
        servers[0].kill()
        until(lambda: engine.stats().extra["servers_live"] == 1)
        back = servers[0].restarted()
        engine.publish(update(False, 1))
        until(lambda: engine._serving.pool.members[0].state == "behind" or back.weight == 1.0)
        engine.publish(update(False, 2))
        assert back.calls.count("/init_weight_transfer_engine") == 1
        assert back.weight == 2.0 and engine.stats().extra["servers_live"] == 2
        engine.submit(requests(8))
        assert all(min(r.versions) == 2 for event in finished(engine, 8).values() for r in event.rollouts)
    finally:
        engine.close()


def test_a_run_whose_only_server_was_started_again_sends_it_the_weights_it_trains_with(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_route, "_obstacle", lambda *where: None)
    monkeypatch.setattr(queue, "WHILE_WAITING_SECONDS", 0.1)
    server, back = StubServer(step=0.02, **GPU), []

    def kill_and_restart() -> None:
        engine = trainer._session.engine
        until(lambda: engine._version == 2 and engine.stats().active_rollouts > 0)
        server.kill()
        until(lambda: engine.stats().extra["servers_live"] == 0)
        back.append(server.restarted())

    trainer = trainer_on(
        [server],
        tmp_path,
        At(2, lambda: threading.Thread(target=kill_and_restart, daemon=True).start()),
        max_staleness=0,  # nothing else is there to be trained meanwhile
        vllm_outage_timeout=15.0,
        max_steps=5,
        peft_config=None,
    )
    trainer.train()
    check_groups(trainer.groups, range(5))
    assert back[0].calls.count("/finish_weight_update") == 3  # of version 2 again, and of 3 and 4


def test_a_server_must_allow_the_handles(tmp_path):
    server = StubServer(VLLM_ALLOW_INSECURE_SERIALIZATION=False, **GPU)
    with pytest.raises(EngineError, match="reads no handles") as error:
        on_the_gpu([server], tmp_path, transfer="ipc")
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION=1 vllm serve" in str(error.value)
    assert """--weight-transfer-config '{"backend": "ipc"}'""" in str(error.value)


def test_a_trainer_without_a_gpu_is_refused():
    with pytest.raises(EngineError, match="the trainer is on cpu: set 'disk'"):
        IpcTransfer(torch.device("cpu"))


def test_this_machine_is_told_from_others():
    assert is_here("http://localhost:8000") and is_here("http://127.0.0.1:8000")
    assert not is_here("http://192.0.2.7:8000") and not is_here("http://no.such.host.invalid:8000")
