"""The engine on stub servers: policies whose weights say their version, and what is asked of the rollouts."""

import contextlib
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.engines.vllm.stub_server import StubServer, logp_of
from tests.tiny import tiny_config
from trl_a3po.engines.vllm.servers.vllm_servers import VLLMServers
from trl_a3po.protocol.engine import GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.collect import policy_spec

TIMEOUT = 20.0
SAMPLING = SamplingSettings(max_new_tokens=24, stop_token_ids=(1,))
_MODELS: dict[bool, torch.nn.Module] = {}


@contextlib.contextmanager
def stub_vllm_on_path():
    """Inside, `stub_vllm/` is found as vLLM, here and by workers that are started here."""
    folder = str(Path(__file__).parent / "stub_vllm")
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def policy(lora: bool) -> torch.nn.Module:
    if lora not in _MODELS:
        model = AutoModelForCausalLM.from_config(tiny_config(num_hidden_layers=1), dtype=torch.float32)
        _MODELS[lora] = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")) if lora else model
    return _MODELS[lora]


def update(lora: bool, version: int, *, complete: bool = False, weight: float | None = None) -> WeightUpdate:
    """The weights of `version`: the stub's log-probs under them are `logp_of(version)`, or of another `weight`."""
    named = {n: p.detach() for n, p in policy(lora).named_parameters() if complete or p.requires_grad}
    first = min(name for name in named if not lora or ".lora_" in name)
    named[first] = torch.full_like(named[first], float(version if weight is None else weight))
    return WeightUpdate(version, named, complete)


def started(servers: list[StubServer], folder, **changes) -> VLLMServers:
    """An engine on stub servers, at version 0."""
    lora = servers[0].lora
    settings = {
        "kept_versions": 4,
        "poll": 0.05,
        "start_timeout": TIMEOUT,
        "request_timeout": TIMEOUT,
        "outage_timeout": 2.0,
    }
    sampling = changes.pop("sampling", SAMPLING)
    engine = VLLMServers([server.url for server in servers], folder=folder, **{**settings, **changes})
    engine.start(policy_spec(policy(lora), torch.float32), sampling, update(lora, 0, complete=True))
    return engine


def requests(count: int, rollouts: int = 4, first: int = 0) -> list[GroupRequest]:
    return [GroupRequest(first + i, first + i, (5 + i, 6, 7), rollouts) for i in range(count)]


def finished(engine: VLLMServers, count: int, timeout: float = TIMEOUT) -> dict[int, GroupFinished]:
    """`count` groups, each once, all finished, every token's log-prob that of its stamped version."""
    events, deadline = {}, time.monotonic() + timeout
    while len(events) < count:
        assert time.monotonic() < deadline, f"{len(events)} of {count} groups came: {engine.stats()}"
        for event in engine.wait(0.2):
            assert isinstance(event, GroupFinished), event
            assert event.request_id not in events
            events[event.request_id] = event
    for event in events.values():
        for rollout in event.rollouts:
            assert rollout.logps == [logp_of(version) for version in rollout.versions]
    return events


def until(condition, timeout: float = TIMEOUT) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
