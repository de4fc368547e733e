"""The delivery check: engines that serve other weights than they claim are caught, with numbers; good ones pass."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny import VOCAB, tiny_config
from trl_a3po.engines.transformers.transformers_engine import TransformersEngine
from trl_a3po.errors import DeliveryError
from trl_a3po.models.replica import load_update
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.collect import collect_weights, policy_sources, policy_spec
from trl_a3po.publish.delivery import DeliveryCheck, ProbeTokens
from trl_a3po.publish.delivery_faults import StartMeasurements, fault_after_publish
from trl_a3po.publish.gap_watch import GapWatch
from trl_a3po.publish.local_policy import LocalPolicy, call_with_weights, probe_logps
from trl_a3po.publish.merged import collect_merged, merged_sources, merged_spec
from trl_a3po.publish.perturbation import perturbed_weights
from trl_a3po.testing import StubEngine, completion_logps, scripted_completion

PROMPTS = [[5, 9, 12, 30], [7, 40, 3, 22, 8, 15], [33, 21, 50, 11, 60]]


def policy(kind: str = "full", **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(**changes), dtype=torch.float32)
    if kind == "lora":  # B is zero, as at the start of a run
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    return model.train()


def check_of(engine, model, *, version: int = 0, spec=None, update=None, sources=policy_sources, every: int = 10):
    """A check of `engine`, which is started with the weights of `model`."""
    sampling = SamplingSettings(max_new_tokens=16)
    engine.start(
        spec or policy_spec(model, torch.float32), sampling, update or collect_weights(model, version, complete=True)
    )
    probes = ProbeTokens.of_prompts(PROMPTS, 16)
    watch = GapWatch("the probe tokens", torch.float32)
    return DeliveryCheck(
        engine, LocalPolicy(model, sources), probes, temperature=1.0, every=every, timeout=60.0, watch=watch
    )


def stub(engine_class=StubEngine, *arguments):
    return engine_class(scripted_completion(VOCAB, 8), *arguments)


@torch.no_grad()
def step(model, scale: float = 0.05):
    """A step of training large enough to see."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(scale * torch.randn_like(parameter))


# --- engines that misbehave ---------------------------------------------------------------------------------------


class SkipsPublishes(StubEngine):
    """Says that it has the new version, and has not."""

    def publish(self, update):
        if update.complete:
            super().publish(update)
        self.version = update.version


class SkipsAllAdapters(StubEngine):
    """Loads everything that an update holds beside the adapter."""

    def publish(self, update):
        rest = {name: tensor for name, tensor in update.tensors.items() if "lora_" not in name}
        super().publish(update if update.complete else WeightUpdate(update.version, rest, complete=False))


class StaleHead(StubEngine):
    """Has untied its output layer from the embeddings, which alone are sent."""

    def publish(self, update):
        super().publish(update)
        if update.complete:
            head = self._replica.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
            self.names = set(update.tensors)


class OtherTemperature(StubEngine):
    def __init__(self, complete, temperature):
        super().__init__(complete)
        self.temperature = temperature

    def score(self, prompt_ids, completion_ids, timeout):
        logps = completion_logps(self._replica, prompt_ids, completion_ids, self.temperature)
        return logps.tolist(), self.version


class Lies(StubEngine):
    def score(self, prompt_ids, completion_ids, timeout):
        logps, version = super().score(prompt_ids, completion_ids, timeout)
        return logps, version + 1


class NeverRestores(StubEngine):
    """Takes one update, and no other of the same version."""

    def publish(self, update):
        if update.complete or self.published.count(update.version) < 2:
            super().publish(update)


class AnswersNaN(StubEngine):
    def score(self, prompt_ids, completion_ids, timeout):
        logps, version = super().score(prompt_ids, completion_ids, timeout)
        return [float("nan")] * len(logps), version


@pytest.mark.parametrize(
    "engine, kind, message",
    [
        (stub(SkipsPublishes), "full", "moved the trainer's .* by [12].*, but the engine's by 0"),
        (stub(SkipsPublishes), "lora", "but the engine's by 0"),
        (stub(SkipsAllAdapters), "lora", "but the engine's by 0.*the adapter is not loaded"),
        (stub(StaleHead), "tied", "but not alike: token by token .*lm_head keeps old weights"),
        (stub(OtherTemperature, 0.7), "full", "more than .*another temperature"),
        (stub(OtherTemperature, 1.3), "lora", "more than .*another temperature"),
        (stub(Lies), "full", "Version 0 was published last, but the engine answers as version 1"),
        (
            stub(NeverRestores),
            "full",
            "after the true weights were published again, .* are still [12]",
        ),
        (stub(AnswersNaN), "full", "but the engine's by nan"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, StubEngine) else value[:4],
)
def test_a_faulty_engine_is_caught_at_start(engine, kind, message):
    model = policy(kind, tie_word_embeddings=kind == "tied")
    check = check_of(engine, model)
    with pytest.raises(DeliveryError, match=message):
        check.at_start(0)


def test_an_adapter_that_is_loaded_in_part_is_caught():
    class LoadsOnlyA(StubEngine):
        def publish(self, update):
            kept = {name: tensor for name, tensor in update.tensors.items() if "lora_B" not in name}
            super().publish(update if update.complete else WeightUpdate(update.version, kept, complete=False))

    model = policy("lora")
    with pytest.raises(DeliveryError, match="by 0"):
        check_of(stub(LoadsOnlyA), model).at_start(0)


class StopsFollowing(StubEngine):
    """Loads no update from version `last` on."""

    last = 3

    def publish(self, update):
        if update.version <= self.last:
            super().publish(update)
        self.version = update.version


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_engine_that_stops_following_is_caught_within_two_checks(kind):
    model, engine = policy(kind), stub(StopsFollowing)
    check = check_of(engine, model, every=2)
    check.at_start(0)
    with pytest.raises(DeliveryError, match=r"Version [468] was published, but .* closer to version [024]:"):
        for version in range(1, 9):
            step(model, 0.01)
            engine.publish(collect_weights(model, version, complete=False))
            check.after_publish(version)


# --- engines that do not ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "lora", "tied"])
def test_a_good_engine_passes_and_its_gap_is_small(kind):
    model, engine = policy(kind, tie_word_embeddings=kind == "tied"), stub()
    check = check_of(engine, model, every=2)
    start = check.at_start(0)
    assert start.trainer_movement >= 1 and start.movement_error < 1e-4 and start.restore_error == 0
    for version in range(1, 9):
        step(model)
        engine.publish(collect_weights(model, version, complete=False))
        check.after_publish(version)
    gaps = check.new_gaps()
    assert len(gaps) == 1 + 4 and max(gaps) < 1e-4 and check.new_gaps() == []


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_afterwards_the_engine_holds_the_true_weights_and_the_policy_is_untouched(kind):
    model, engine = policy(kind), stub()
    before = copy.deepcopy(model.state_dict())
    dropout = torch.nn.Dropout(0.5).eval()
    model.add_module("frozen_dropout", dropout)  # its mode is not the model's
    noise = torch.random.get_rng_state()
    objects = {name: id(parameter) for name, parameter in model.named_parameters()}
    check_of(engine, model).at_start(0)
    assert torch.equal(torch.random.get_rng_state(), noise)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == objects
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training and model.get_input_embeddings().training and not dropout.training
    served = engine._replica.state_dict()
    assert all(torch.equal(served[name], tensor) for name, tensor in before.items())


def test_merged_adapters_are_checked_as_the_plain_model_that_is_served():
    model, engine = policy("lora"), stub()

    options = {
        "spec": merged_spec(model, torch.float32),
        "update": collect_merged(model, 0),
        "sources": merged_sources,
    }
    start = check_of(engine, model, **options).at_start(0)
    assert start.trainer_movement >= 1 and start.movement_error < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_engine_of_a_coarser_dtype_passes(dtype):
    model, engine = policy(), stub()
    start = check_of(engine, model, spec=policy_spec(model, dtype)).at_start(0)
    assert 1e-4 < start.gap < 0.1 and start.movement_error < 0.1 * start.trainer_movement


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_transformers_engine_passes(kind):
    model = policy(kind, tie_word_embeddings=True)
    engine = TransformersEngine(slots=2, threads=1, start_timeout=60.0)
    try:
        check = check_of(engine, model, every=1)
        assert check.at_start(0).movement_error < 1e-4
        step(model)
        engine.publish(collect_weights(model, 1, complete=False))
        check.after_publish(1)
        assert max(check.new_gaps()) < 1e-4
    finally:
        engine.close()


# --- decisions and tools ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers, fault",
    [
        ({}, None),
        ({"gap": 0.19, "movement_error": 0.19, "restore_error": 0.19}, None),
        ({"engine_movement": 0.19}, "but the engine's by 0.19"),
        ({"engine_movement": float("nan")}, "by nan"),
        ({"movement_error": 0.11}, "not alike"),
        ({"movement_error": 0.11, "gap": 0.03}, None),
        ({"movement_error": 0.21, "gap": 0.1}, "not alike"),
        ({"restore_error": 0.06}, "still 0.06"),
        ({"gap": 0.21}, "For the same weights"),
        ({"gap": float("inf")}, "For the same weights"),
    ],
    ids=str,
)
def test_the_start_is_judged_by_parts_of_the_trainers_movement(numbers, fault):
    good = {
        "trainer_movement": 1.0,
        "engine_movement": 0.9,
        "movement_error": 0.04,
        "restore_error": 0.04,
        "gap": 0.001,
    }
    found = StartMeasurements(**{**good, **numbers}).fault()
    assert (found is None) == (fault is None) and (fault is None or fault in found)


def test_later_an_engine_must_be_closest_to_the_version_published_last():
    old, new = torch.zeros(3, 6), torch.full((3, 6), 1.0)

    def judge(engine, gap, old=old):
        return fault_after_publish(torch.full((3, 6), engine), new, {4: old}, 8, gap)

    assert judge(0.9, 0.05) is None
    assert "Version 8 was published" in judge(0.1, 0.05) and "closer to version 4" in judge(0.1, 0.05)
    assert judge(0.1, 0.34) is None  # the versions are not three gaps apart: nothing can be said
    assert judge(0.1, 0.33) is not None
    assert "not finite" in judge(float("nan"), 0.05)
    assert judge(1.0, 0.0, old=new + 1e-4) is None  # rounding


def test_probe_tokens_are_a_rectangle_made_of_the_prompts_tokens():
    probes = ProbeTokens.of_prompts(PROMPTS, 3)
    assert probes.prompts == [[5, 9, 12, 30], [3, 22, 8, 15][-4:], [21, 50, 11, 60]]
    assert [len(completion) for completion in probes.completions] == [3, 3, 3]
    assert {t for completion in probes.completions for t in completion} <= {t for prompt in PROMPTS for t in prompt}
    assert probes == ProbeTokens.of_prompts(PROMPTS, 3)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_probe_log_probs_are_those_of_one_clean_forward_a_text(temperature):
    model, probes = policy(), ProbeTokens.of_prompts(PROMPTS, 5)
    found = probe_logps(model, probes.prompts, probes.completions, temperature)
    for row, prompt, completion in zip(found, probes.prompts, probes.completions, strict=True):
        torch.testing.assert_close(row, completion_logps(model, prompt, completion, temperature), rtol=0, atol=1e-5)


def test_every_trained_weight_moves_and_no_two_alike():
    model = policy("lora")
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    moved = perturbed_weights(model, 0.1)
    assert moved.keys() == trained.keys()
    noise = {name: moved[name] - tensor for name, tensor in trained.items()}
    assert all(delta.abs().max() > 0 for delta in noise.values())
    flat = [delta.flatten()[:64] / delta.norm() for delta in noise.values() if delta.numel() >= 64]
    assert not any(torch.allclose(a, b, atol=1e-3) for i, a in enumerate(flat) for b in flat[:i])


def test_a_model_with_other_weights_is_the_model_that_loads_them():
    model, other = policy(tie_word_embeddings=True), policy(tie_word_embeddings=True)
    weights = perturbed_weights(model, 0.2)
    load_update(other, WeightUpdate(0, weights, complete=False))
    ids = torch.tensor(PROMPTS[:1])
    found = call_with_weights(model, weights, lambda changed: changed(ids).logits)
    torch.testing.assert_close(found, other(ids).logits)


def test_weights_that_no_forward_reads_are_named_as_the_cause():
    model = policy()
    model.requires_grad_(False)
    model.register_parameter("idle", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(DeliveryError, match=r"No perturbation .* 0 with noise of 0.07"):
        check_of(stub(), model, update=collect_weights(policy(), 0, complete=True)).at_start(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_below_an_untrained_output_layer_is_checked_by_the_little_it_moves(dtype):
    model = policy("lora", initializer_range=0.02)
    start = check_of(stub(), model, spec=policy_spec(model, dtype)).at_start(0)
    assert 0.02 <= start.trainer_movement < 1
    with pytest.raises(DeliveryError, match="but the engine's by 0"):
        check_of(stub(SkipsAllAdapters), model, spec=policy_spec(model, dtype)).at_start(0)
