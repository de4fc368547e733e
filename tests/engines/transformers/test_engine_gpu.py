"""TransformersEngine with its replica on a GPU: weights through device memory."""

import copy
import os
import signal

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.engines.transformers.running import events_of, started, train
from tests.engines.transformers.tiny_models import gap, prompts, request, tiny_model
from tests.workers.processes import until
from trl_a3po.engines.transformers.draws import Draw
from trl_a3po.publish.collect import collect_weights

pytestmark = pytest.mark.gpu


def policy(kind: str):
    model = tiny_model("llama-tied", max_position_embeddings=256)
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).eval()
    return model


def assert_serves(engine, model, version: int):
    requests = [request(100 * version + i, text) for i, text in enumerate(prompts(4))]
    engine.submit(requests)
    events = events_of(engine, [one.request_id for one in requests])
    reference = copy.deepcopy(model).cpu()
    for one in requests:
        [rollout] = events[one.request_id].rollouts
        assert set(rollout.versions) == {version}
        assert gap(reference, one.prompt_ids, rollout).max() < 1e-3


@pytest.mark.parametrize("trained_on", ["cpu", "cuda:0"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_published_weights_are_sampled_from(kind, trained_on):
    model = policy(kind).to(trained_on)
    engine = started(model, 20, device="cuda:0")
    try:
        assert_serves(engine, model, 0)
        for version in (1, 2):
            train(model)
            engine.publish(collect_weights(model, version, complete=False))
            assert_serves(engine, model, version)
    finally:
        engine.close()


def test_a_restarted_worker_has_the_weights_published_last():
    model = policy("full").cuda()
    engine = started(model, 20, device="cuda")
    try:
        train(model)
        engine.publish(collect_weights(model, 1, complete=False))
        os.kill(engine.worker_pid, signal.SIGKILL)
        until(lambda: engine.stats().restarts == 1)
        assert_serves(engine, model, 1)
    finally:
        engine.close()


def test_an_adapters_frozen_base_is_not_copied():
    base = tiny_model("llama-tied", max_position_embeddings=256, hidden_size=512, vocab_size=2**18).cuda()
    size = base.get_input_embeddings().weight.nbytes  # 0.5 GiB
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    engine = started(model, 20, device="cuda:0")
    try:
        assert engine._staging.shared.keys() == {n for n, p in model.named_parameters() if not p.requires_grad}
        assert_serves(engine, model, 0)
        context = 2**30  # of the worker
        assert free - torch.cuda.mem_get_info()[0] < context + size
        train(model)
        engine.publish(collect_weights(model, 1, complete=False))
        assert_serves(engine, model, 1)
        os.kill(engine.worker_pid, signal.SIGKILL)
        until(lambda: engine.stats().restarts == 1)
        assert_serves(engine, model, 1)
    finally:
        engine.close()


def test_the_trainer_and_the_engine_may_use_different_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = policy("full").to("cuda:0")
    engine = started(model, 20, device="cuda:1")
    try:
        train(model)
        engine.publish(collect_weights(model, 1, complete=False))
        assert_serves(engine, model, 1)
    finally:
        engine.close()


def test_what_another_gpu_draws_is_waited_for():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device("cuda:1"):
        torch.cuda._sleep(10**9)  # cycles, about half a second
        drawn = torch.arange(6, dtype=torch.float64, device="cuda:1").reshape(2, 3)
    assert Draw.of([], 0, drawn).read().tolist() == [[0, 1, 2], [3, 4, 5]]
