"""On a CPU the trainer leaves the embedded engine its share of the cores while it trains."""

import pytest
import torch

from trl_a3po import A3POConfig
from trl_a3po.session import cores as module
from trl_a3po.session.cores import SharedCores, engine_threads

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(module, "cores", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("settings", "device", "trainers"),
    [
        ({}, CPU, 4),
        ({"engine_device": ["cpu", "cpu"]}, CPU, 4),
        ({"engine_threads": 6}, CPU, 8),
        ({"engine": "vllm"}, CPU, 8),
        ({}, GPU, 8),
    ],
)
def test_threads_of_the_trainer(eight_cores, tmp_path, settings, device, trainers):
    args = A3POConfig(str(tmp_path), **settings)
    shared = SharedCores(args, device)
    assert torch.get_num_threads() == trainers
    shared.restore()
    assert torch.get_num_threads() == 8


def test_fewer_threads_stay_fewer(eight_cores, tmp_path):
    torch.set_num_threads(2)
    SharedCores(A3POConfig(str(tmp_path)), CPU)
    assert torch.get_num_threads() == 2


def test_workers_of_the_engine_divide_its_half(eight_cores, tmp_path):
    assert engine_threads(A3POConfig(str(tmp_path), engine_device=["cpu", "cpu"])) == 2
