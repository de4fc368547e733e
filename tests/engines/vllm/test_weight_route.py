"""Which way whole weights take, by where the trainer and the servers are."""

import pytest
import torch

from trl_a3po.engines.vllm.servers import weight_route
from trl_a3po.engines.vllm.servers.nccl import NcclTransfer
from trl_a3po.engines.vllm.servers.server import ServerInfo
from trl_a3po.engines.vllm.servers.weight_route import weight_transfer

CPU, FIRST = torch.device("cpu"), torch.device("cuda:0")
HERE = "http://localhost:8000"


@pytest.fixture
def vllm_here(monkeypatch):
    """What would need vLLM, or a GPU, to be made."""
    monkeypatch.setattr(weight_route, "_has_vllm", lambda: True)
    monkeypatch.setattr(NcclTransfer, "__init__", lambda self, device: None)


def info(transfer, **changes) -> ServerInfo:
    return ServerInfo("0.31.0", "base", 64, **{"transfer": transfer, "dev_mode": True, **changes})


def test_servers_started_for_different_ways_are_sent_to_by_disk_and_that_is_said(vllm_here, caplog):
    urls = [HERE, "http://localhost:8001"]
    assert weight_transfer("auto", FIRST, urls, [info("nccl"), info(None)]) is None
    assert "by 'nccl', but http://localhost:8001 was not" in caplog.text


@pytest.mark.parametrize(
    ("setting", "found", "way"),
    [
        ("auto", [info("nccl")], NcclTransfer),
        ("auto", [info(None)], type(None)),
        ("auto", [info(None), info("nccl")], type(None)),
        ("disk", [info("nccl")], type(None)),
        ("nccl", [info("nccl")], NcclTransfer),
    ],
)
def test_running_servers_are_sent_to_by(vllm_here, setting, found, way):
    assert type(weight_transfer(setting, FIRST, [HERE] * len(found), found)) is way


@pytest.mark.parametrize(
    ("trainer", "url", "found", "why"),
    [
        (CPU, HERE, info("nccl"), "the trainer is on cpu"),
        (FIRST, HERE, info("ipc"), "not known here"),
    ],
)
def test_a_way_that_servers_were_started_for_and_that_cannot_be_taken_is_said(
    vllm_here, trainer, url, found, why, caplog
):
    assert weight_transfer("auto", trainer, [url], [found]) is None
    assert why in caplog.text and "they go by disk" in caplog.text
