"""Images on a real vLLM: what is recorded is what a clean forward gives, under the weights of the stamped version, by
the trainer's own arrays; a publish leaves nothing of what the vision tower made of an image before."""

import dataclasses

import pytest
import torch

from tests.engines.transformers.running import events_of, train
from tests.engines.vllm.real_pictures import (
    TOLERANCE,
    WholeProcessor,
    check_stamps,
    policy,
    request,
    sampling_of,
    weights_of,
)
from tests.engines.vllm.real_vllm import vllm_python
from tests.images.pictured import pictured, pictured_turns, with_pictures
from tests.runs import logged
from tests.vision import picture
from tests.workers.processes import until
from trl_a3po.engines.vllm.process.vllm_engine import VLLMEngine
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.publish.collect import collect_weights, policy_spec

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TEMPERATURE = 0.8
LENGTH = 500  # tokens; a real vLLM has sampled few hundred before a publish comes
CASES = [
    ("qwen2_5_vl", "whole", "recompute", 1),
    ("idefics3", "adapter", "keep", 1),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("qwen2_5_vl", "adapter", "recompute", 1),
            ("qwen2_5_vl", "whole", "recompute", 2),
            ("qwen3_vl", "whole", "keep", 1),
            ("idefics3", "whole", "keep", 1),
            ("llava_next", "whole", "recompute", 1),
        ]
    ],
]


@pytest.mark.parametrize("name, what, kv_on_publish, devices", CASES)
def test_a_publish_leaves_nothing_of_the_images_before(name, what, kv_on_publish, devices):
    model, processor = policy(name, what == "adapter")
    first, second, third = picture(1), picture(2, 30, 18), picture(3, 12, 28)
    requests = [request(processor, 0, first), request(processor, 1, second, third), request(processor, 2)]
    requests += [dataclasses.replace(requests[0], request_id=3), request(processor, 4, third)]
    engine = VLLMEngine(
        slots=5,
        python=vllm_python(),
        processor=WholeProcessor(processor),
        kv_on_publish=kv_on_publish,
        other_devices=["cpu"] * (devices - 1),
        threads=1,
        start_timeout=300.0,
    )
    try:
        sampling = sampling_of(processor, TEMPERATURE, LENGTH)
        engine.start(policy_spec(model, torch.float32), sampling, collect_weights(model, 0, complete=True))
        states = [weights_of(model)]
        train(model, scale=0.05)
        states.append(weights_of(model))
        trained = collect_weights(model, 1, complete=False)
        engine.submit(requests[:3])
        until(lambda: engine.stats().tokens > 20)
        engine.publish(trained)
        engine.submit(requests[3:])
        events = events_of(engine, range(5))
    finally:
        engine.close()
    spans = check_stamps(model, states, requests, events, kv_on_publish=kv_on_publish, temperature=TEMPERATURE)
    assert {(True, 0, 1), (True, 1)} <= spans


@pytest.mark.slow  # the run whose turns add pictures, below, is checked in the same way
def test_a_run_trains_on_what_vllm_has_sampled(tmp_path):
    model, processor = policy("qwen2_5_vl", adapter=False)
    processor.save_pretrained = WholeProcessor(processor).save_pretrained
    trainer = pictured(
        "qwen2_5_vl",
        tmp_path,
        model=model,
        processing_class=processor,
        engine="vllm",
        vllm_python=vllm_python(),
        engine_slots=8,
        engine_threads=1,
        max_staleness=1,
        max_steps=4,
        kv_on_publish="recompute",
        delivery_check_steps=2,
    )
    trainer.train()
    assert trainer.state.global_step == 4
    gaps = [*logged(trainer, "a3po/delivery/gap"), *logged(trainer, "a3po/engine_gap/max")]
    assert gaps and max(gaps) < TOLERANCE


@pytest.mark.slow
def test_attention_in_both_directions_which_vllm_lacks_on_a_cpu_is_refused():
    model, processor = policy("gemma3", adapter=False)
    engine = VLLMEngine(slots=1, python=vllm_python(), processor=processor, start_timeout=300.0, threads=1)
    try:
        with pytest.raises(EngineError, match=r"both directions in Gemma3.*CPU_ATTN.*engine='transformers'"):
            engine.start(
                policy_spec(model, torch.float32), SamplingSettings(4), collect_weights(model, 0, complete=True)
            )
    finally:
        engine.close()


@pytest.mark.parametrize("kv_on_publish", ["recompute", pytest.param("keep", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl", *(pytest.param(f, marks=pytest.mark.slow) for f in ("idefics3", "qwen3_vl", "llava_next"))],
)
def test_a_run_trains_on_turns_that_add_pictures(tmp_path, family, kv_on_publish):
    model, processor = policy(family, adapter=False)
    processor.save_pretrained = WholeProcessor(processor).save_pretrained
    trainer = pictured(
        family,
        tmp_path,
        model=model,
        processing_class=processor,
        engine="vllm",
        vllm_python=vllm_python(),
        rollout_func=pictured_turns,
        train_dataset=with_pictures([1, 0, 2, 1]),
        max_completion_length=200,
        engine_slots=8,
        engine_threads=1,
        max_staleness=0 if kv_on_publish == "keep" else 1,
        max_steps=3,
        kv_on_publish=kv_on_publish,
        delivery_check_steps=2,
    )
    trainer.train()
    assert trainer.state.global_step == 3
    gaps = [*logged(trainer, "a3po/delivery/gap"), *logged(trainer, "a3po/engine_gap/max")]
    assert gaps and max(gaps) < TOLERANCE
    assert logged(trainer, "a3po/episodes/turns") == [3.0] * 3
