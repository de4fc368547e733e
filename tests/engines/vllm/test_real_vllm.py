"""Training on real vLLM servers: what they say of each token is true, and the delivery check sees what goes wrong."""

import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.engines.vllm.real_runs import STALENESS, TEMPERATURE, CheckingTrainer, trainer_of
from tests.workers.processes import until
from trl_a3po.engines.vllm.noise import noise_seed
from trl_a3po.engines.vllm.servers.completions import completion_body
from trl_a3po.engines.vllm.servers.http import Call
from trl_a3po.engines.vllm.servers.publishing import AdapterPublishing
from trl_a3po.engines.vllm.servers.server import Server
from trl_a3po.engines.vllm.servers.token_chunks import parse_answer
from trl_a3po.engines.vllm.servers.vllm_servers import VLLMServers
from trl_a3po.errors import DeliveryError
from trl_a3po.protocol.engine import GroupRequest, SamplingSettings
from trl_a3po.publish.collect import collect_weights, policy_sources, policy_spec
from trl_a3po.publish.delivery import DeliveryCheck, ProbeTokens
from trl_a3po.publish.gap_watch import GapWatch
from trl_a3po.publish.local_policy import LocalPolicy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]
STEPS = 5


def check_versions(trainer: CheckingTrainer, *, exact_after_a_publish: bool) -> None:
    assert trainer.state.global_step == STEPS and trainer.stalest >= 1
    own, other = torch.tensor(trainer.own), torch.tensor(trainer.other)
    assert own.max() < 1e-3 and other.mean() > 10 * own.mean()
    if exact_after_a_publish and trainer.later_parts:
        assert max(trainer.later_parts) < 1e-3
    gaps = [entry["a3po/delivery/gap"] for entry in trainer.state.log_history if "a3po/delivery/gap" in entry]
    assert gaps and max(gaps) < 1e-3


@pytest.mark.parametrize("kv_on_publish", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
def test_a_lora_run_stamps_every_token_with_its_version(adapter_server, tied_model, tmp_path, kv_on_publish):
    settings = {"vllm_server_urls": [adapter_server], "kv_on_publish": kv_on_publish, "max_steps": STEPS}
    trainer = trainer_of(tied_model, tmp_path, True, **settings)
    trainer.train()
    check_versions(trainer, exact_after_a_publish=True)
    assert (trainer.spanning > 0) <= (kv_on_publish == "recompute")
    assert not [name for name in Server(adapter_server).info().adapters if name.startswith("policy-")]


@pytest.mark.parametrize("kv_on_publish", [pytest.param("keep", marks=pytest.mark.slow), "recompute"])
def test_a_run_with_whole_weights_stamps_every_token_with_its_version(
    weights_server, untied_model, tmp_path, kv_on_publish
):
    trainer = trainer_of(
        untied_model,
        tmp_path,
        False,
        vllm_server_urls=[weights_server],
        kv_on_publish=kv_on_publish,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=0.02,
        max_grad_norm=1.0,
    )
    trainer.train()
    check_versions(trainer, exact_after_a_publish=kv_on_publish == "recompute")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["periodic", "fixed_lag"])
def test_every_group_is_of_the_version_that_the_schedule_says(adapter_server, tied_model, tmp_path, schedule):
    trainer = trainer_of(
        tied_model,
        tmp_path,
        True,
        vllm_server_urls=[adapter_server],
        schedule=schedule,
        gradient_accumulation_steps=2,
        loss_type="grpo",
        max_steps=4,
    )
    trainer.train()
    lag = 0 if schedule == "periodic" else STALENESS
    versions = [(at, {v for r in group.rollouts for v in r.versions}) for at, group in trainer.groups]
    assert versions == [(at, {max(0, at - lag)}) for at in range(4) for _ in range(2)]
    assert max(trainer.own) < 1e-3


def test_the_noise_of_a_rollout_is_decided_by_its_seed(adapter_server):
    server, sampling = Server(adapter_server), SamplingSettings(12, temperature=TEMPERATURE)

    def sampled(seed: int, count: int) -> list[list[int]]:
        body = completion_body(sampling, server.info().model, "seeds", range(300, 310), count=count, done=0, seed=seed)
        pieces = parse_answer(server.completion(body, 60.0).data(), count)
        return [piece.token_ids for piece in sorted(pieces, key=lambda piece: piece.index)]

    group = sampled(noise_seed(0, 5, 0, 0), 4)
    assert sampled(noise_seed(0, 5, 0, 0), 4) == group and len(set(map(tuple, group))) == 4
    assert sampled(noise_seed(0, 5, 2, 0), 1) == [group[2]]


# --- a publish in the middle of rollouts ---------------------------------------------------------------------------


def generated_tokens(url: str) -> float:
    """Tokens that a server has sampled since it started."""
    lines = Call(url, "GET", "/metrics", timeout=30.0).text().splitlines()
    counts = [line.rpartition(" ")[2] for line in lines if line.startswith("vllm:generation_tokens_total{")]
    return sum(map(float, counts))


@torch.no_grad()
def replayed_logps(model, states, prompt_ids, rollout, *, keeps: bool) -> list[float]:
    """Log-probs of a rollout by its own versions: each segment under its weights, after the cache of the segment
    before, or, where caches are not kept, after one of its own."""
    ids = torch.tensor([[*prompt_ids, *rollout.token_ids]])
    start = len(prompt_ids) - 1  # the token whose logits the completion's first one was sampled from
    boundaries = [i for i, v in enumerate(rollout.versions) if i == 0 or v != rollout.versions[i - 1]]
    logps, cache, cached = [], None, 0
    for begin, end in zip(boundaries, [*boundaries[1:], len(rollout.token_ids)], strict=True):
        model.load_state_dict(states[rollout.versions[begin]])
        if not keeps:
            cache, cached = None, 0
        output = model(ids[:, cached : start + end], past_key_values=cache, use_cache=True)
        scores = (output.logits[0].float() / TEMPERATURE).log_softmax(-1)[start + begin - cached :]
        logps += scores.gather(1, ids[0, start + 1 + begin : start + 1 + end, None])[:, 0].tolist()
        cache, cached = output.past_key_values, start + end
    return logps


@pytest.mark.parametrize(
    "kind",
    # The third one is the first with the caches of the second; the run with whole weights, above, has both.
    ["whole, keep", "adapter, recompute", pytest.param("whole, recompute", marks=pytest.mark.slow)],
)
def test_a_publish_in_the_middle_of_rollouts_divides_them_at_the_token(
    kind, whole, weights_server, adapted, adapter_server, tmp_path
):
    what, kv_on_publish = kind.split(", ")
    model, url = (whole, weights_server) if what == "whole" else (adapted, adapter_server)
    length = 400 if what == "whole" else 120  # whole weights take seconds to write, which must not be the last ones
    sampling = SamplingSettings(length, temperature=TEMPERATURE)
    prompt_ids = tuple(range(300, 310))
    engine = VLLMServers([url], folder=tmp_path, kv_on_publish=kv_on_publish, kept_versions=4)
    states = {0: {name: tensor.clone() for name, tensor in model.state_dict().items()}}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05 * max(parameter.std().item(), 0.1))
    states[1] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(states[0])
    try:
        engine.start(policy_spec(model, torch.float32), sampling, collect_weights(model, 0, complete=True))
        before = generated_tokens(url)
        engine.submit([GroupRequest(0, 0, prompt_ids, 2)])
        until(lambda: generated_tokens(url) > before + 8)
        model.load_state_dict(states[1])
        engine.publish(collect_weights(model, 1, complete=False))
        events, deadline = [], time.monotonic() + 300
        while not events:
            assert time.monotonic() < deadline, engine.stats()
            events = engine.wait(1.0)
        for rollout in events[0].rollouts:
            assert set(rollout.versions) == {0, 1}
            replayed = replayed_logps(model, states, prompt_ids, rollout, keeps=kv_on_publish == "keep")
            assert max(abs(a - b) for a, b in zip(replayed, rollout.logps, strict=True)) < 2e-3
    finally:
        model.load_state_dict(states[0])
        engine.close()


# --- the delivery check ---------------------------------------------------------------------------------------------


def delivery_check(model, url, tmp_path, *, temperature=TEMPERATURE) -> None:
    """The check at start, of an engine at `TEMPERATURE`, by a trainer at `temperature`."""
    engine = VLLMServers([url], folder=tmp_path, kept_versions=4)
    known = ProbeTokens.of_prompts([list(range(100, 110)), list(range(200, 210))], 8)
    try:
        sampling = SamplingSettings(8, temperature=TEMPERATURE, stop_token_ids=(2,))
        engine.start(policy_spec(model, torch.float32), sampling, collect_weights(model, 0, complete=True))
        policy = LocalPolicy(model, policy_sources)
        DeliveryCheck(
            engine,
            policy,
            known,
            temperature=temperature,
            every=1,
            timeout=60,
            watch=GapWatch("the probe tokens", torch.float32),
        ).at_start(0)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def adapted(tied_model):
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))


@pytest.fixture(scope="module")
def whole(untied_model):
    return AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32)


def test_the_check_passes_what_is_right(adapted, adapter_server, whole, weights_server, tmp_path):
    delivery_check(adapted, adapter_server, tmp_path)
    delivery_check(whole, weights_server, tmp_path)


def test_the_check_sees_a_skipped_publish(whole, weights_server, tmp_path, monkeypatch):
    monkeypatch.setattr(Server, "reload_weights", lambda server, folder: None)
    with pytest.raises(DeliveryError, match="perturbed copy"):
        delivery_check(whole, weights_server, tmp_path)


def test_the_check_sees_an_adapter_that_is_never_used(adapted, adapter_server, tmp_path, monkeypatch):
    monkeypatch.setattr(AdapterPublishing, "model_name", lambda publishing, member: member.info.model)
    with pytest.raises(DeliveryError, match="perturbed copy"):
        delivery_check(adapted, adapter_server, tmp_path)


def test_the_check_sees_another_temperature(adapted, adapter_server, tmp_path):
    with pytest.raises(DeliveryError):
        delivery_check(adapted, adapter_server, tmp_path, temperature=1.0)
