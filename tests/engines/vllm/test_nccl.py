"""The parts of the NCCL publish that need no GPU."""

import sys

import pytest
import torch

from trl_a3po.engines.vllm.nccl import NcclTransfer, buckets
from trl_a3po.errors import EngineError
from trl_a3po.publish.policy import WeightUpdate

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


def test_a_trainer_without_a_gpu_is_refused():
    with pytest.raises(EngineError, match="the trainer is on cpu: set 'disk'"):
        NcclTransfer(CPU)


def test_a_trainer_without_vllm_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r"trl-a3po\[vllm\]"):
        NcclTransfer(torch.device("cuda"))
