"""SlotDecoder against clean forwards of the same model."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.engines.transformers.tiny_models import (
    VOCAB,
    clean_logps,
    gap,
    moved,
    prompts,
    request,
    run,
    settings,
    tiny_model,
)
from trl_a3po.engines.transformers.decoder import SlotDecoder
from trl_a3po.engines.transformers.sampling import noise_stream, uniform_noise
from trl_a3po.errors import EngineError


def test_tokens_are_the_inverse_cdf_of_a_clean_forward_at_the_counter_noise():
    model, text, temperature = tiny_model(), prompts(1)[0], 0.7
    [rollout] = run(
        SlotDecoder(model, settings(30, temperature=temperature), slots=2), [request(9, text, noise_key=77)]
    )[9]
    ids = torch.tensor([[*text, *rollout.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(text) - 1 : -1].double()
    for position, token in enumerate(rollout.token_ids):
        cdf = (logits[position] / temperature).softmax(-1).cumsum(-1)
        stream = torch.tensor([noise_stream(5, 77, 0)], dtype=torch.uint64).numpy()
        u = uniform_noise(stream, torch.tensor([position]).numpy())[0]
        low = cdf[token - 1] if token else 0.0
        assert low - 1e-5 <= u <= cdf[token] + 1e-5


def test_log_probs_have_the_temperature_applied():
    model, text = tiny_model(), prompts(1)[0]
    [rollout] = run(SlotDecoder(model, settings(10, temperature=0.5), slots=1), [request(0, text)])[0]
    assert gap(model, text, rollout, temperature=0.5).max() < 1e-4
    assert gap(model, text, rollout, temperature=1.0).max() > 1e-2


def test_log_probs_are_those_of_the_policy_before_any_filter():
    model, text = tiny_model(), prompts(1)[0]
    filtered = settings(10, top_k=5, top_p=0.8, min_p=0.05, repetition_penalty=1.3, suppress_token_ids=(7,))
    rollouts = run(SlotDecoder(model, filtered, slots=2), [request(0, text, 4)])[0]
    for rollout in rollouts:
        assert 7 not in rollout.token_ids
        assert gap(model, text, rollout).max() < 1e-4


def test_a_peft_model_is_sampled_through_its_adapter():
    base = tiny_model()
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    text = prompts(1)[0]
    [rollout] = run(SlotDecoder(model, settings(10), slots=2), [request(0, text)])[0]
    assert gap(model, text, rollout).max() < 1e-4
    with model.disable_adapter():
        assert gap(model, text, rollout).max() > 1e-2


def test_a_prompt_is_prefilled_once_per_group_even_when_its_rollouts_start_at_different_times():
    decoder = SlotDecoder(tiny_model(), settings(4), slots=2)
    prefilled = []
    prefill = decoder._forward.prefill
    decoder._forward.prefill = lambda texts, *args, **kwargs: (
        prefilled.extend(texts) or prefill(texts, *args, **kwargs)
    )
    run(decoder, [request(i, text, 5) for i, text in enumerate(prompts(3))])
    assert sorted(prefilled) == sorted(prompts(3))


def test_prompts_waiting_together_are_prefilled_in_one_forward():
    decoder = SlotDecoder(tiny_model(), settings(4), slots=4)
    batches = []
    prefill = decoder._forward.prefill
    decoder._forward.prefill = lambda texts, *args, **kwargs: (
        batches.append(len(texts)) or prefill(texts, *args, **kwargs)
    )
    run(decoder, [request(i, range(3, 10 + i)) for i in range(4)])
    assert batches == [4]


def test_a_stop_token_ends_the_completion_and_belongs_to_it():
    model, text = tiny_model(), prompts(1)[0]
    free = run(SlotDecoder(model, settings(12), slots=4), [request(0, text, 4)])[0]
    stops = {rollout.token_ids[5] for rollout in free}
    stopped = run(SlotDecoder(model, settings(12, stop_token_ids=tuple(stops)), slots=4), [request(0, text, 4)])[0]
    for rollout, whole in zip(stopped, free, strict=True):
        end = next(i for i, token in enumerate(whole.token_ids) if token in stops)
        assert rollout.token_ids == whole.token_ids[: end + 1]
        assert rollout.finish_reason == "stop"


def test_no_completion_stops_before_min_new_tokens():
    everything_but_one = tuple(range(1, VOCAB))
    sampling = settings(9, stop_token_ids=everything_but_one, min_new_tokens=4)
    for rollout in run(SlotDecoder(tiny_model(), sampling, slots=3), [request(0, (5, 6), 8)])[0]:
        assert rollout.token_ids[:4] == [0] * 4
        assert len(rollout.token_ids) >= 5


def test_a_completion_of_one_token_needs_no_decode_step():
    model, text = tiny_model(), prompts(1)[0]
    decoder = SlotDecoder(model, settings(1), slots=2)
    decoder.submit(request(0, text, 5))
    [group] = decoder.step()
    assert decoder.idle and [len(rollout.token_ids) for rollout in group.rollouts] == [1] * 5
    for rollout in group.rollouts:
        assert gap(model, text, rollout).max() < 1e-4


def test_tokens_counts_every_sampled_token():
    decoder = SlotDecoder(tiny_model(), settings(7), slots=3)
    run(decoder, [request(0, (4, 5), 4), request(1, (6,), 2)])
    assert decoder.tokens == 6 * 7


def test_nan_weights_raise_and_name_the_version():
    model = tiny_model()
    decoder = SlotDecoder(model, settings(7), slots=3, version=3)
    decoder.submit(request(0, (4, 5), 2))
    decoder.step()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    decoder.set_version(4)
    with pytest.raises(EngineError, match="NaN or infinite under version 4"):
        decoder.step()


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers():
    decoder = SlotDecoder(tiny_model(), settings(16), slots=3)
    decoder.submit(request(0, [5] * 80))
    with pytest.raises(
        ValueError, match=r"prompt of 81 tokens, but at most 80 fit beside max_new_tokens=16.*context of 96"
    ):
        decoder.submit(request(1, [5] * 81))


def test_the_whole_context_can_be_used():
    model = tiny_model()
    [rollout] = run(SlotDecoder(model, settings(16), slots=3), [request(0, [5] * 80)])[0]
    assert gap(model, [5] * 80, rollout).max() < 1e-4


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(0, ()), "empty prompt"),
        (request(0, (5, VOCAB)), "vocabulary is 0 to 63"),
        (request(0, (5, -1)), "vocabulary is 0 to 63"),
        (request(0, (5,), 0), "num_rollouts=0"),
    ],
)
def test_requests_that_cannot_be_sampled_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        SlotDecoder(tiny_model(), settings(), slots=2).submit(bad)


def test_a_request_id_in_use_is_refused():
    decoder = SlotDecoder(tiny_model(), settings(), slots=2)
    decoder.submit(request(0, (5,)))
    with pytest.raises(ValueError, match="already being sampled"):
        decoder.submit(request(0, (6,)))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"slots": 0}, "slots=0"),
        ({"slots": 2, "kv_on_publish": "drop"}, "kv_on_publish='drop'"),
        ({"slots": 2, "deterministic": True}, "max_prompt_tokens=None"),
        (
            {"slots": 2, "max_prompt_tokens": 95},
            "max_prompt_tokens=95 are together more than the model's context of 96",
        ),
    ],
)
def test_settings_that_cannot_hold_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        SlotDecoder(tiny_model(), settings(), **keywords)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gemma2-sliding"])
def test_log_probs_agree_with_a_clean_forward_on_a_gpu(name, deterministic, mode):
    model = tiny_model(name).cuda()
    sampling = settings(20, repetition_penalty=1.2, top_p=0.9, min_new_tokens=3, stop_token_ids=(7, 8, 9))
    decoder = SlotDecoder(
        model, sampling, slots=4, deterministic=deterministic, max_prompt_tokens=12, kv_on_publish=mode
    )
    texts = prompts(5)
    for i, text in enumerate(texts):
        decoder.submit(request(i, text, 3))
    first = [decoder.step() for _ in range(2)]
    decoder.set_version(1)
    results = run(decoder) | {group.request_id: group.rollouts for groups in first for group in groups}
    for i, text in enumerate(texts):
        for rollout in results[i]:
            assert gap(model, text, rollout).max() < 1e-4


def test_a_clean_forward_of_a_moved_model_disagrees():
    """The comparison of this file can fail."""
    model, text = tiny_model(), prompts(1)[0]
    [rollout] = run(SlotDecoder(model, settings(10), slots=1), [request(0, text)])[0]
    assert gap(moved(model), text, rollout).max() > 1e-2
    assert clean_logps(model, text, rollout.token_ids).shape == (10,)
