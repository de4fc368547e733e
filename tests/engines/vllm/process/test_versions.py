"""Versions are facts: every token's log-prob is that of a clean forward of the weights it is stamped with."""

import contextlib
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.engines.transformers.running import events_of, train
from tests.engines.vllm.real_vllm import vllm_python
from tests.engines.vllm.stubbed import stub_vllm_on_path
from tests.tiny import tiny_config
from tests.workers.processes import until
from trl_a3po.engines.vllm.process.vllm_engine import VLLMEngine
from trl_a3po.protocol.engine import GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.publish.collect import collect_weights, policy_spec
from trl_a3po.testing import completion_logps

TEMPERATURE, START_TIMEOUT = 0.8, 300.0
ROUNDING = 2e-4  # of float32, over hundreds of tokens, in kernels that differ from machine to machine
SHORT, LONG = 120, 600  # tokens; a real vLLM has sampled few hundred before a publish comes
SETTINGS = SamplingSettings(SHORT, temperature=TEMPERATURE, seed=5)
LONGER = SamplingSettings(LONG, temperature=TEMPERATURE, seed=5)
FILTERED = SamplingSettings(LONG, temperature=TEMPERATURE, top_p=0.9, top_k=20, repetition_penalty=1.2, seed=5)


def policy(lora: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(head_dim=64, max_position_embeddings=1024), dtype=torch.float32
    )
    if lora:
        return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    return model


def trained_states(model) -> dict[int, dict[str, torch.Tensor]]:
    """Version -> the weights of `model`, now and after training; it has the first ones."""
    states = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]
    train(model)
    states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    model.load_state_dict(states[0])
    return dict(enumerate(states))


@contextlib.contextmanager
def published_in_the_middle(model, sampling, **engine_settings):
    """An engine that has sampled across a publish, every token of which was checked; `model` has its weights."""
    states = trained_states(model)
    requests = [GroupRequest(number, number, (5 + number, 6, 7), 2) for number in range(3)]
    engine = VLLMEngine(slots=5, threads=1, start_timeout=START_TIMEOUT, **engine_settings)
    try:
        engine.start(policy_spec(model, torch.float32), sampling, collect_weights(model, 0, complete=True))
        engine.submit(requests)
        until(lambda: engine.stats().tokens > 20)
        model.load_state_dict(states[1])
        engine.publish(collect_weights(model, 1, complete=False))
        rollouts = [
            (request, rollout)
            for request, event in zip(requests, events_of(engine, range(3)).values(), strict=True)
            for rollout in event.rollouts
        ]
        assert any(set(rollout.versions) == {0, 1} for _, rollout in rollouts)
        clean: dict[int, list[torch.Tensor]] = {}
        for version, state in states.items():
            model.load_state_dict(state)
            clean[version] = [
                completion_logps(model, request.prompt_ids, rollout.token_ids, TEMPERATURE)
                for request, rollout in rollouts
            ]
        for number, (_, rollout) in enumerate(rollouts):
            of_versions = torch.stack([clean[version][number] for version in states])  # (2, T)
            stamped = of_versions.gather(0, torch.tensor(rollout.versions)[None])[0]
            assert torch.tensor(rollout.logps).tolist() == pytest.approx(stamped.tolist(), abs=ROUNDING)
            # So that a wrong stamp is noticed.
            assert (of_versions[0] - of_versions[1]).abs().median() > 50 * ROUNDING
        yield engine
    finally:
        model.load_state_dict(states[0])
        engine.close()


def test_with_two_batches_under_way():
    with stub_vllm_on_path(), published_in_the_middle(policy(lora=False), SETTINGS, python=sys.executable):
        pass


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "lora",
    # test_training.py and test_tensor_parallel.py hold tokens of whole weights against their versions too.
    [pytest.param(False, id="whole", marks=pytest.mark.slow), pytest.param(True, id="adapter")],
)
def test_with_a_real_vllm(lora):
    with published_in_the_middle(policy(lora), FILTERED, python=vllm_python(), kv_on_publish="recompute"):
        pass


@contextlib.contextmanager
def published_with_kept_caches(**engine_settings):
    """An engine that has sampled across a publish. Tokens before the publish were those of the old weights, and
    rollouts that began after it, of the new ones."""
    model, old = policy(lora=False), policy(lora=False)
    states = trained_states(model)
    engine = VLLMEngine(slots=6, threads=1, start_timeout=START_TIMEOUT, python=vllm_python(), **engine_settings)
    try:
        engine.start(policy_spec(model, torch.float32), LONGER, collect_weights(model, 0, complete=True))
        engine.submit([GroupRequest(number, number, (5, 6, 7), 2) for number in range(3)])
        until(lambda: engine.stats().tokens > 20)
        model.load_state_dict(states[1])
        engine.publish(collect_weights(model, 1, complete=False))
        engine.submit([GroupRequest(3, 3, (5, 6, 7), 2)])
        spans = set()
        for event in events_of(engine, range(4)).values():
            assert isinstance(event, GroupFinished)
            for rollout in event.rollouts:
                spans.add(tuple(sorted(set(rollout.versions))))
                first = rollout.versions[0]
                clean = completion_logps(model if first else old, (5, 6, 7), rollout.token_ids, TEMPERATURE).tolist()
                of_first = rollout.versions.count(first)
                assert rollout.logps[:of_first] == pytest.approx(clean[:of_first], abs=ROUNDING)
        assert (0, 1) in spans and (1,) in spans
        yield engine
    finally:
        engine.close()


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_kept_cache_of_a_real_vllm_is_that_of_the_segments_before():
    with published_with_kept_caches():
        pass
