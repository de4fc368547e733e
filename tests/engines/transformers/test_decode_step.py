"""Captured decode steps: on a CPU with a tape, which replays the operations of a step on the same memory, and on a GPU
with CUDA graphs."""

import logging

import pytest
import torch

from tests.engines.transformers.taped import captured
from tests.engines.transformers.tiny_models import VOCAB, gap, load, moved, prompts, request, run, settings, tiny_model
from trl_a3po.engines.transformers.decode_step import cuda_graphs
from trl_a3po.engines.transformers.decoder import SlotDecoder

FAMILIES = [
    *("llama", "llama-eager", "qwen3", "gemma", "gpt2", "glm4"),
    *("qwen2-sliding", "gemma3-sliding", "mistral-sliding"),
]


def stopping(length: int, **changes):
    return settings(length, stop_token_ids=tuple(range(56, VOCAB)), **changes)


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for key, group in mine.items():
        for one, other in zip(group, theirs[key], strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            torch.testing.assert_close(one.logps, other.logps, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_sample_what_plain_steps_sample(name):
    model = tiny_model(name)
    sampling = stopping(24, repetition_penalty=1.1, top_p=0.95, min_new_tokens=2)
    requests = [request(i, text, 2) for i, text in enumerate(prompts(9))]
    decoder = SlotDecoder(model, sampling, slots=7)
    capture = captured(decoder)
    assert_same(run(decoder, requests), run(SlotDecoder(model, sampling, slots=7), requests))
    assert capture.replays > 2 * capture.captured > 0


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_captured_steps_read_weights_that_change_in_place(mode):
    def sample(capture: bool):
        serving = tiny_model()
        decoder = SlotDecoder(serving, settings(24), slots=5, kv_on_publish=mode)
        if capture:
            captured(decoder)
        for i, text in enumerate(prompts(4)):
            decoder.submit(request(i, text, 2))
        # A request is cancelled, and weights change while a draw is unread.
        groups = [decoder.step() for _ in range(6)]
        decoder.cancel([1])
        load(serving, moved(serving))
        decoder.set_version(1)
        return run(decoder) | {group.request_id: group.rollouts for found in groups for group in found}

    ours, plain = sample(True), sample(False)
    assert_same(ours, plain)
    for key, group in ours.items():
        for one, other in zip(group, plain[key], strict=True):
            assert one.versions == other.versions
    assert any(len(set(rollout.versions)) == 2 for group in ours.values() for rollout in group)


def test_captured_shapes_are_few():
    decoder = SlotDecoder(tiny_model(max_position_embeddings=512), stopping(200), slots=16)
    capture = captured(decoder)
    run(decoder, [request(i, text, 8) for i, text in enumerate(prompts(8))])
    assert capture.captured <= 16 and capture.replays > 50


def test_a_draw_is_read_one_step_later_and_a_slot_refilled_after_that():
    decoder = SlotDecoder(tiny_model(), settings(3, stop_token_ids=tuple(range(VOCAB))), slots=1)
    captured(decoder)
    decoder.submit(request(0, (5, 6), 2))
    assert decoder.step() == []  # the first token and a second one, which will not count
    assert decoder.tokens == 1
    [rollout, other] = run(decoder)[0]
    assert len(rollout.token_ids) == len(other.token_ids) == 1 and decoder.tokens == 2


def test_what_cannot_be_captured_is_decoded_as_it_is_with_one_sentence(caplog):
    model, requests = tiny_model("mixtral-sliding"), [request(i, text, 2) for i, text in enumerate(prompts(5))]
    plain = run(SlotDecoder(model, settings(16), slots=4), requests)
    # A mixture whose experts are computed in a loop over those that got a token.
    decoder = SlotDecoder(model, settings(16), slots=4)
    captured(decoder)
    model.config._experts_implementation = "eager"
    with caplog.at_level(logging.WARNING):
        assert_same(run(decoder, requests), plain)
    [record] = caplog.records
    assert "cannot be captured" in record.getMessage() and "not permitted" in record.getMessage()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("name", FAMILIES)
def test_cuda_graphs_sample_what_plain_steps_sample(name, mode, dtype):
    def sample(graphs: bool):
        serving = tiny_model(name).cuda().to(dtype)
        decoder = SlotDecoder(serving, stopping(40, top_p=0.95), slots=7, kv_on_publish=mode)
        if not graphs:
            decoder._steps._capture = None
        for i, text in enumerate(prompts(9)):
            decoder.submit(request(i, text, 2))
        groups = [decoder.step() for _ in range(12)]
        if dtype == torch.float32:
            load(serving, moved(tiny_model(name)).cuda())
        decoder.set_version(1)
        results = run(decoder) | {group.request_id: group.rollouts for found in groups for group in found}
        return results, serving, len(decoder._steps._captured)

    (ours, model, shapes), (plain, _, none) = sample(True), sample(False)
    assert shapes > 0 == none
    for key, text in enumerate(prompts(9)):
        for one, other in zip(ours[key], plain[key], strict=True):
            if dtype == torch.float32:
                assert one.token_ids == other.token_ids
                torch.testing.assert_close(one.logps, other.logps, atol=1e-4, rtol=0)
            else:
                assert gap(model, text, one).mean() < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_that_waits_for_the_device_is_decoded_without_graphs(caplog):
    model = tiny_model().cuda()
    # Reads a number, and changes nothing.
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + 0 * output[0, 0, 0].item())
    decoder = SlotDecoder(model, settings(16), slots=4)
    with caplog.at_level(logging.WARNING):
        results = run(decoder, [request(i, text, 2) for i, text in enumerate(prompts(5))])
    assert "cannot be captured" in caplog.text
    for key, text in enumerate(prompts(5)):
        for rollout in results[key]:
            assert gap(model, text, rollout).max() < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_are_captured_again_when_the_cache_has_grown():
    model = tiny_model(max_position_embeddings=512).cuda()
    decoder = SlotDecoder(model, settings(200), slots=4)
    results = run(decoder, [request(i, text, 2) for i, text in enumerate(prompts(2))])
    assert decoder._steps.pads and decoder._cache.capacity > 200
    for key, text in enumerate(prompts(2)):
        for rollout in results[key]:
            assert gap(model, text, rollout).max() < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_leaves_the_state_as_it_was():
    slot = torch.zeros(3, device="cuda")

    def step():
        slot.add_(1)
        return slot * 2

    replay = cuda_graphs(torch.device("cuda"))(step)
    assert slot.tolist() == [0.0] * 3
    assert replay().tolist() == [2.0] * 3 and replay().tolist() == [4.0] * 3
