"""Which way whole weights take, by where the trainer and the servers are."""

import pytest
import torch

from trl_a3po.engines.vllm import weight_route
from trl_a3po.engines.vllm.ipc import IpcTransfer
from trl_a3po.engines.vllm.nccl import NcclTransfer
from trl_a3po.engines.vllm.server import ServerInfo
from trl_a3po.engines.vllm.weight_route import same_gpu, transfer_backend_to_start, weight_transfer
from trl_a3po.errors import EngineError

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
HERE, ELSEWHERE = "http://localhost:8000", "http://192.0.2.7:8000"


@pytest.fixture
def vllm_here(monkeypatch):
    """What would need vLLM, or a GPU, to be made."""
    monkeypatch.setattr(weight_route, "_has_vllm", lambda: True)
    monkeypatch.setattr(NcclTransfer, "__init__", lambda self, device: None)


def info(transfer, **changes) -> ServerInfo:
    return ServerInfo(
        "0.31.0", "base", 64, **{"transfer": transfer, "reads_handles": True, "dev_mode": True, **changes}
    )


@pytest.mark.parametrize(
    ("setting", "trainer", "server", "backend"),
    [
        ("auto", FIRST, FIRST, "ipc"),
        ("auto", FIRST, SECOND, "nccl"),
        ("auto", FIRST, CPU, None),
        ("auto", CPU, FIRST, None),
        ("auto", CPU, CPU, None),
        ("auto", FIRST, None, None),
        ("disk", FIRST, FIRST, None),
        ("nccl", FIRST, None, "nccl"),
        ("ipc", FIRST, None, "ipc"),
    ],
)
def test_a_server_is_started_for(vllm_here, setting, trainer, server, backend):
    assert transfer_backend_to_start(setting, trainer, server) == backend


def test_a_gpu_without_a_number_is_the_current_one(vllm_here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert transfer_backend_to_start("auto", FIRST, torch.device("cuda")) == "ipc"
    assert same_gpu(torch.device("cuda"), FIRST) and not same_gpu(torch.device("cuda"), SECOND)


@pytest.mark.parametrize(
    ("setting", "server", "why"),
    [("nccl", FIRST, "the trainer's own"), ("ipc", SECOND, "within one GPU"), ("ipc", CPU, "within one GPU")],
)
def test_a_way_that_does_not_lead_to_the_server_is_refused_before_it_starts(setting, server, why):
    with pytest.raises(EngineError, match=f"vllm_weight_transfer='{setting}' .*{why}"):
        transfer_backend_to_start(setting, FIRST, server)


def test_servers_started_for_different_ways_are_sent_to_by_disk_and_that_is_said(vllm_here, caplog):
    urls = [HERE, "http://localhost:8001"]
    assert weight_transfer("auto", FIRST, urls, [info("nccl"), info(None)]) is None
    assert "by 'nccl', but http://localhost:8001 was not" in caplog.text


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_another_process_may_not_open_goes_by_disk_and_that_is_said(vllm_here, monkeypatch, caplog, name):
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    assert transfer_backend_to_start("auto", FIRST, FIRST) is None and "expandable_segments:True" in caplog.text
    caplog.clear()
    assert weight_transfer("auto", FIRST, [HERE], [info("ipc")]) is None and "expandable_segments:True" in caplog.text
    assert transfer_backend_to_start("ipc", FIRST, FIRST) == "ipc"


def test_without_vllm_here_a_server_on_another_gpu_is_started_for_the_disk(monkeypatch):
    monkeypatch.setattr(weight_route, "_has_vllm", lambda: False)
    assert transfer_backend_to_start("auto", FIRST, SECOND) is None


@pytest.mark.parametrize(
    ("setting", "found", "way"),
    [
        ("auto", [info("ipc")], IpcTransfer),
        ("auto", [info("nccl")], NcclTransfer),
        ("auto", [info(None)], type(None)),
        ("auto", [info("ipc"), info("nccl")], type(None)),
        ("disk", [info("ipc")], type(None)),
        ("ipc", [info("ipc")], IpcTransfer),
        ("nccl", [info("nccl")], NcclTransfer),
    ],
)
def test_running_servers_are_sent_to_by(vllm_here, setting, found, way):
    assert type(weight_transfer(setting, FIRST, [HERE] * len(found), found)) is way


@pytest.mark.parametrize(
    ("trainer", "url", "found", "why"),
    [
        (CPU, HERE, info("ipc"), "the trainer is on cpu"),
        (FIRST, ELSEWHERE, info("ipc"), "is on another machine"),
        (FIRST, HERE, info("ipc", reads_handles=False), "VLLM_ALLOW_INSECURE_SERIALIZATION=1"),
        (CPU, HERE, info("nccl"), "the trainer is on cpu"),
        (FIRST, HERE, info("sharded_rdt"), "not known here"),
    ],
)
def test_a_way_that_servers_were_started_for_and_that_cannot_be_taken_is_said(
    vllm_here, trainer, url, found, why, caplog
):
    assert weight_transfer("auto", trainer, [url], [found]) is None
    assert why in caplog.text and "they go by disk" in caplog.text
