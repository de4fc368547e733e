"""TransformersEngine end to end: a real worker process, held to the trainer-side model."""

import copy
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.engines.transformers.running import events_of, started, train
from tests.engines.transformers.tiny_models import clean_logps, gap, prompts, request, tiny_model
from tests.workers.processes import TIMEOUT, until
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFailed, GroupFinished
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.collect import collect_weights

TOKENS = 120
numbers = itertools.count()


class Run:
    """A trained model, its engine, and the next version."""

    def __init__(self, model, **changes):
        self.model = model
        self.version = 0
        self.engine = started(model, TOKENS, **changes)

    def step(self, scale: float = 0.1, complete: bool = False):
        train(self.model, scale)
        self.version += 1
        self.engine.publish(collect_weights(self.model, self.version, complete=complete))

    def sample(self, texts, rollouts: int = 1):
        """[(prompt, its rollouts)]"""
        requests = [request(next(numbers), text, rollouts) for text in texts]
        self.engine.submit(requests)
        events = events_of(self.engine, [one.request_id for one in requests])
        return [(one.prompt_ids, events[one.request_id].rollouts) for one in requests]


def run_of(model, **changes):
    run = Run(model, **changes)
    yield run
    run.engine.close()


@pytest.fixture(scope="module")
def tied():
    yield from run_of(tiny_model("llama-tied", max_position_embeddings=256))


@pytest.fixture(scope="module")
def recomputing():
    yield from run_of(tiny_model("qwen3", max_position_embeddings=256), kv_on_publish="recompute")


@pytest.fixture(scope="module")
def lora():
    model = get_peft_model(tiny_model(max_position_embeddings=256), LoraConfig(r=4, target_modules="all-linear"))
    yield from run_of(model.eval())


def assert_clean(model, samples, version):
    for text, rollouts in samples:
        for rollout in rollouts:
            assert set(rollout.versions) == {version}
            assert gap(model, text, rollout).max() < 1e-4


def test_log_probs_agree_with_the_trained_model(tied):
    assert_clean(tied.model, tied.sample(prompts(6), rollouts=2), tied.version)


@pytest.mark.parametrize("complete", [False, True])
def test_a_request_after_publish_is_sampled_from_the_published_weights(tied, complete):
    before = copy.deepcopy(tied.model)
    tied.step(complete=complete)
    samples = tied.sample(prompts(3))
    assert_clean(tied.model, samples, tied.version)  # the tied lm_head included
    assert min(gap(before, text, rollout).max() for text, [rollout] in samples) > 1e-2


def versions_in_flight(run):
    """Sample while versions are published; returns the samples and the model of every version."""
    requests = [request(next(numbers), text) for text in prompts(8)]
    models = {run.version: copy.deepcopy(run.model)}
    run.engine.submit(requests)
    events = {}
    while len(events) < len(requests):
        events |= {event.request_id: event for event in run.engine.wait(0.03)}
        run.step(0.02)
        models[run.version] = copy.deepcopy(run.model)
    return [(one.prompt_ids, events[one.request_id].rollouts[0]) for one in requests], models


@pytest.mark.parametrize("mode", ["tied", "recomputing"])
def test_versions_published_in_mid_sequence_are_stamped_in_order(mode, request):
    run = request.getfixturevalue(mode)
    samples, models = versions_in_flight(run)
    for _, rollout in samples:
        assert rollout.versions == sorted(rollout.versions)
        assert set(rollout.versions) <= set(models)
    assert any(len(set(rollout.versions)) > 1 for _, rollout in samples)


def test_recomputed_log_probs_are_those_of_the_stamped_version(recomputing):
    samples, models = versions_in_flight(recomputing)
    for text, rollout in samples:
        stamps = torch.tensor(rollout.versions)
        for version in set(rollout.versions):
            assert gap(models[version], text, rollout)[stamps == version].max() < 1e-4


def test_an_update_of_an_adapter_moves_its_bytes_alone_and_is_sampled_from(lora):
    before = copy.deepcopy(lora.model)
    lora.step()
    trainable = sum(weight.nbytes for weight in lora.model.parameters() if weight.requires_grad)
    assert lora.engine.stats().extra["published_bytes"] == trainable
    samples = lora.sample(prompts(3))
    assert_clean(lora.model, samples, lora.version)
    assert min(gap(before, text, rollout).max() for text, [rollout] in samples) > 1e-2


def test_a_request_that_cannot_be_served_fails_alone(tied):
    good, bad = request(next(numbers), (1, 2, 3)), request(next(numbers), [1] * 300)
    tied.engine.submit([bad, good])
    events = events_of(tied.engine, [good.request_id, bad.request_id])
    assert isinstance(events[good.request_id], GroupFinished)
    assert isinstance(events[bad.request_id], GroupFailed) and "300" in events[bad.request_id].reason
    assert tied.engine.stats().restarts == 0


def test_an_incomplete_update_may_leave_out_what_has_not_changed(lora):
    lora.step()
    rest = dict(collect_weights(lora.model, lora.version, complete=False).tensors)
    del rest[sorted(rest)[0]]
    lora.engine.publish(WeightUpdate(lora.version, rest, complete=False))
    assert_clean(lora.model, lora.sample(prompts(1)), lora.version)


def test_a_complete_update_that_forgets_a_weight_is_refused(tied):
    tensors = dict(collect_weights(tied.model, 0, complete=True).tensors)
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"lacks 'model\.norm\.weight'"):
        tied.engine.publish(WeightUpdate(tied.version + 1, tensors))


def test_requests_that_come_while_weights_are_on_their_way_wait_for_them_and_others_go_on():
    model = tiny_model(max_position_embeddings=2048)
    engine, arrived = started(model, 1500, slots=2), threading.Event()
    write = engine._staging.write
    engine._staging.write = lambda update: (write(update)[0], SimpleNamespace(wait=lambda: arrived.wait(TIMEOUT)))
    try:
        engine.submit([request(0, (5, 6))])
        until(lambda: engine.stats().tokens > 0)
        train(model)
        engine.publish(collect_weights(model, 1, complete=False))  # returns, though nothing has arrived
        engine.submit([request(1, (7, 8), 1)])
        sampled = engine.stats().tokens
        until(lambda: engine.stats().tokens > sampled)
        assert engine.stats().waiting_requests == 1
        engine.cancel([0])
        arrived.set()
        logps, version = engine.score((5, 6), (7, 8), TIMEOUT)
        assert version == 1
        assert (torch.tensor(logps) - clean_logps(model, (5, 6), (7, 8))).abs().max() < 1e-4
        [rollout] = events_of(engine, [1])[1].rollouts
        assert set(rollout.versions) == {1}
    finally:
        arrived.set()
        engine.close()


@pytest.mark.long
def test_weights_that_do_not_arrive_end_the_engine_with_the_reason():
    model = tiny_model()
    engine = started(model, 8)

    def fail():
        raise RuntimeError("no room")

    write = engine._staging.write
    engine._staging.write = lambda update: (write(update)[0], SimpleNamespace(wait=fail))
    try:
        engine.publish(collect_weights(model, 1, complete=False))
        with pytest.raises(EngineError, match=r"version 1 failed half-way \(no room\)"):
            engine.wait(TIMEOUT)
    finally:
        engine.close()


@pytest.mark.long
def test_the_next_publish_waits_for_the_weights_that_are_on_their_way():
    model = tiny_model()
    engine, arrived = started(model, 8, publish_timeout=0.5), threading.Event()
    write = engine._staging.write
    engine._staging.write = lambda update: (write(update)[0], SimpleNamespace(wait=lambda: arrived.wait(TIMEOUT)))
    try:
        engine.publish(collect_weights(model, 1, complete=False))
        with pytest.raises(EngineError, match=r"Version 2 cannot be published: after publish_timeout=0\.5"):
            engine.publish(collect_weights(model, 2, complete=False))
        arrived.set()
        assert engine.score((5, 6), (7, 8), TIMEOUT)[1] == 1
    finally:
        arrived.set()
        engine.close()
