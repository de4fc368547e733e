"""Which engines are built from the settings, and what the plan says of them: one for each replica."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_config
from trl_a3po import A3POConfig
from trl_a3po.engines.several import SeveralEngines
from trl_a3po.engines.vllm.process import vllm_engine
from trl_a3po.report.trainer_plan import trainer_plan
from trl_a3po.session import build_engine
from trl_a3po.session.build_engine import engine_slots, engines_of

GPUS = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(GPUS))


def config(devices, size, **settings):
    base = {"output_dir": "unused", "per_device_train_batch_size": 4, "num_generations": 4, "report_to": "none"}
    return A3POConfig(
        **base, use_cpu=True, engine="vllm", engine_device=devices, vllm_tensor_parallel_size=size, **settings
    )


@pytest.fixture
def replicas(monkeypatch):
    """Devices, slots and share of memory of every vLLM that is built."""
    built = []

    class Recording(vllm_engine.VLLMEngine):
        def __init__(self, **settings):
            devices = [str(device) for device in (settings["device"], *settings["other_devices"])]
            built.append((devices, settings["slots"], settings["gpu_memory"]))
            super().__init__(**settings)

    monkeypatch.setattr(build_engine, "VLLMEngine", Recording)
    return built


@pytest.mark.parametrize(
    ("devices", "size", "expected"),
    [
        (GPUS, 1, [["cuda:0"], ["cuda:1"], ["cuda:2"], ["cuda:3"]]),
        (GPUS, 2, [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]),
        (GPUS, 4, [GPUS]),
        (["cuda:3", "cuda:1"], 2, [["cuda:3", "cuda:1"]]),
    ],
)
def test_devices_that_follow_each_other_hold_one_replica(replicas, devices, size, expected):
    args = config(devices, size)
    engine = build_engine.build_engine(args, torch.device("cpu"))
    assert replicas == [(on, 256, 0.9) for on in expected]
    assert isinstance(engine, SeveralEngines) == (len(expected) > 1)
    assert engines_of(args) == len(expected) and engine_slots(args) == 256 * len(expected)
    engine.close()


def test_slots_are_shared_out_among_replicas(replicas):
    build_engine.build_engine(config(GPUS, 2, engine_slots=11), torch.device("cpu")).close()
    assert [slots for _, slots, _ in replicas] == [6, 6]


def test_a_replica_with_one_gpu_that_also_trains_takes_its_share_of_all(replicas, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    args = config(GPUS, 2, vllm_gpu_memory_utilization=0.4)
    monkeypatch.setattr(build_engine, "shares_gpu", lambda args, on, device: on.index == 1)
    build_engine.build_engine(args, torch.device("cpu")).close()
    assert [share for *_, share in replicas] == [0.4, 0.9]


@pytest.mark.parametrize(
    ("devices", "size", "message"),
    [
        (
            GPUS[:3],
            2,
            r"spreads each replica over 2 GPUs, and engine_device=\['cuda:0', 'cuda:1', 'cuda:2'\] does not",
        ),
        (GPUS[:1], 2, "does not name 2 GPUs or a multiple of 2: set engine_device to them, such as"),
        (["cuda:0", "cuda:0"], 2, "names a GPU twice, which cannot hold with vllm_tensor_parallel_size=2"),
    ],
)
def test_devices_that_are_no_whole_replicas_are_refused(devices, size, message):
    with pytest.raises(ValueError, match=message):
        config(devices, size)


def test_the_plan_counts_a_part_of_the_replica_on_each_gpu():
    model = AutoModelForCausalLM.from_config(tiny_config(hidden_size=512, vocab_size=2**16), dtype=torch.float32)
    gib = sum(p.numel() for p in model.parameters()) * 4 / 2**30
    plan = trainer_plan(config(GPUS, 2), model, 4, 4, "padded")
    assert "vllm in a process of its own for each 2 GPUs, which hold one replica, automatic slots" in plan
    assert f"(with a part of the replica, {gib / 2:.2f} GiB)" in plan
    assert f"the published copy, {gib:.2f} GiB of the machine's memory" in plan
    whole = trainer_plan(config(GPUS, 1), model, 4, 4, "padded")
    assert f"(with the replica, {gib:.2f} GiB), and the published copy, {gib:.2f} GiB\n" in whole
