"""The parts of the NCCL publish that need no GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.engines.vllm.stub_server import StubServer
from trl_a3po.engines.vllm.servers.nccl import NcclTransfer, buckets
from trl_a3po.engines.vllm.servers.pool import ServerPool
from trl_a3po.engines.vllm.servers.server import Server
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.protocol.weights import WeightUpdate

CPU = torch.device("cpu")


def update(sizes):
    return WeightUpdate(0, {f"w{i}": torch.arange(float(size)) for i, size in enumerate(sizes)})


def test_buckets_hold_every_tensor_once_in_order_and_no_more_than_they_may():
    given = update([10, 3, 3, 40, 1, 1, 1, 1])
    runs = list(buckets(given, CPU, torch.float32, most=40))
    assert [[name for name, _ in run] for run in runs] == [["w0"], ["w1", "w2"], ["w3"], ["w4", "w5", "w6", "w7"]]
    for name, tensor in (item for run in runs for item in run):
        assert torch.equal(tensor, given.tensors[name])


def test_tensors_travel_in_the_dtype_of_the_server_but_for_those_of_whole_numbers():
    given = WeightUpdate(0, {"w": torch.ones(4), "n": torch.ones(4, dtype=torch.int64)})
    (run,) = buckets(given, CPU, torch.bfloat16, most=1000)
    assert [tensor.dtype for _, tensor in run] == [torch.bfloat16, torch.int64]


def test_a_server_that_was_lost_and_is_back_gets_a_new_group(monkeypatch):
    server = StubServer(backend="nccl")
    of_the_server = Server(server.url)
    pool = ServerPool([(of_the_server, of_the_server.info())], SamplingSettings(8), request_timeout=5.0)
    (member,) = pool.members
    joined = []
    monkeypatch.setattr(NcclTransfer, "__init__", lambda self: self.__dict__.update(_groups={}, _lives={}))
    monkeypatch.setattr(NcclTransfer, "_joined", lambda self, member: joined.append(_Group()) or joined[-1])
    transfer = NcclTransfer()
    pool.admit(member, member.server.info())
    transfer._begin(member)
    transfer._begin(member)
    assert len(joined) == 1
    pool.mark_lost(member, "killed")
    pool.admit(member, member.server.info())
    transfer._begin(member)
    assert transfer._groups == {member: joined[1]} and joined[0].group.store is None


class _Group:
    """As vLLM's communicator: it holds the rendezvous."""

    def __init__(self):
        self.group = SimpleNamespace(store=object(), socket=object())


def test_a_trainer_without_a_gpu_is_refused():
    with pytest.raises(EngineError, match="the trainer is on cpu: set 'disk'"):
        NcclTransfer(CPU)


def test_a_trainer_without_vllm_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r"trl-a3po\[vllm\]"):
        NcclTransfer(torch.device("cuda"))
