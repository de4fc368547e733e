"""What else is in the batch: independence from it, refilled slots, and requests that each finish once."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.engines.transformers.tiny_models import VOCAB, gap, load, moved, prompts, request, run, settings, tiny_model
from trl_a3po.engines.transformers.decoder import SlotDecoder
from trl_a3po.protocol.records import Rollout


def bits(rollout: Rollout):
    return rollout.token_ids, rollout.logps, rollout.versions


def stopping(length: int, **changes):
    """Sampling whose completions end at many different lengths."""
    return settings(length, stop_token_ids=tuple(range(50, VOCAB)), **changes)


@pytest.mark.parametrize("slots", [1, 3, *(pytest.param(slots, marks=pytest.mark.long) for slots in (4, 5, 8))])
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gemma3-sliding", "llama-eager", "gpt2"])
def test_deterministic_bits_do_not_depend_on_the_rest_of_the_batch(name, slots):
    decoder = SlotDecoder(tiny_model(name), stopping(16), slots=slots, deterministic=True, max_prompt_tokens=12)
    texts = prompts(6)
    reference = {key: [bits(r) for r in group] for key, group in together(decoder, texts, range(6)).items()}
    for seed in range(2):
        order = random.Random(seed).sample(range(6), 6)
        for key, group in together(decoder, texts, order).items():
            assert [bits(rollout) for rollout in group] == reference[key]
    for key, text in enumerate(texts):
        [alone] = run(decoder, [request(key, text, 3)]).values()
        assert [bits(rollout) for rollout in alone] == reference[key]


def together(decoder: SlotDecoder, texts, order):
    return run(decoder, [request(key, texts[key], 3) for key in order])


def test_deterministic_bits_survive_a_bigger_model_with_an_odd_vocabulary():
    model = tiny_model(vocab_size=1031, hidden_size=96, intermediate_size=200)
    decoder = SlotDecoder(model, settings(12), slots=6, deterministic=True, max_prompt_tokens=12)
    texts = prompts(4)
    full = together(decoder, texts, range(4))
    for key, text in enumerate(texts):
        assert [bits(r) for r in run(decoder, [request(key, text, 3)])[key]] == [bits(r) for r in full[key]]


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_deterministic_bits_with_a_publish_at_the_same_token_do_not_depend_on_the_batch(mode):
    texts = prompts(3)

    def sample(order):
        serving = tiny_model()
        decoder = SlotDecoder(
            serving, settings(8), slots=9, deterministic=True, max_prompt_tokens=12, kv_on_publish=mode
        )
        for key in order:
            decoder.submit(request(key, texts[key], 3))
        decoder.step()
        load(serving, moved(serving))
        decoder.set_version(1)
        return {key: [bits(r) for r in group] for key, group in run(decoder).items()}

    together_ = sample([0, 1, 2])
    assert sample([2, 0, 1]) == together_
    for key in range(3):
        assert sample([key])[key] == together_[key]


def test_without_deterministic_log_probs_agree_to_1e_4():
    decoder = SlotDecoder(tiny_model(), stopping(16), slots=5)
    texts = prompts(6)
    reference = together(decoder, texts, range(6))
    others = [together(decoder, texts, [3, 1, 5, 0, 2, 4])]
    others += [run(decoder, [request(key, text, 3)]) for key, text in enumerate(texts)]
    for other in others:
        for key, group in other.items():
            for mine, theirs in zip(group, reference[key], strict=True):
                assert mine.token_ids == theirs.token_ids
                torch.testing.assert_close(mine.logps, theirs.logps, atol=1e-4, rtol=0)


def test_the_noise_is_keyed_by_noise_key_and_not_by_request_id():
    decoder, text = SlotDecoder(tiny_model(), settings(16), slots=3), prompts(1)[0]
    groups = run(
        decoder,
        [request(1, text, 3, noise_key=7), request(2, text, 3, noise_key=7), request(3, text, 3, noise_key=8)],
    )
    tokens = {key: [rollout.token_ids for rollout in group] for key, group in groups.items()}
    assert tokens[1] == tokens[2]
    assert all(a != b for a, b in zip(tokens[1], tokens[3], strict=True))


def test_rollouts_of_a_group_differ():
    group = run(SlotDecoder(tiny_model(), settings(16), slots=3), [request(1, (5, 6), 6)])[1]
    assert len({tuple(rollout.token_ids) for rollout in group}) == 6


def test_another_seed_draws_other_tokens():
    one, two = (
        run(SlotDecoder(tiny_model(), settings(16, seed=seed), slots=1), [request(1, (5, 6))])[1][0].token_ids
        for seed in (1, 2)
    )
    assert one != two


def test_the_repetition_penalty_reads_each_sequence_and_not_its_slot():
    """With a penalty this strong no token repeats, whatever the slot held before."""
    sampling = stopping(12, repetition_penalty=1e9, min_new_tokens=1)
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight * 3)
    decoder = SlotDecoder(model, sampling, slots=3)
    texts = prompts(6, longest=6)
    for key, group in together(decoder, texts, range(6)).items():
        for rollout in group:
            assert len(set(rollout.token_ids)) == len(rollout.token_ids)
            assert not set(rollout.token_ids) & set(texts[key])


def count_decodes(decoder: SlotDecoder) -> list[int]:
    """Rows of each decode forward from now on."""
    rows = []
    decode = decoder._forward.decode
    decoder._forward.decode = lambda tokens, *args: rows.append(len(tokens)) or decode(tokens, *args)
    return rows


def test_freed_slots_are_refilled_at_once():
    slots, groups = 4, 24
    decoder = SlotDecoder(tiny_model(), stopping(48), slots=slots)
    rows = count_decodes(decoder)
    results = run(decoder, [request(i, text, 2) for i, text in enumerate(prompts(groups))])
    lengths = [len(rollout.token_ids) for i in range(groups) for rollout in results[i]]
    decoded = [length - 1 for length in lengths]  # the first token comes from the prefill
    synchronous = sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))
    assert max(lengths) > 3 * sum(lengths) / len(lengths), "the lengths must be skewed for this to show anything"
    assert sum(rows) == sum(decoded)
    assert len(rows) <= sum(decoded) / slots + max(lengths)
    assert len(rows) < 0.6 * synchronous


def test_slots_are_given_in_submission_order():
    decoder = SlotDecoder(tiny_model(), settings(3), slots=2)
    order = []
    occupy = decoder._occupy
    decoder._occupy = lambda starts: (
        order.extend((rollout.group.request.request_id, rollout.number) for _, rollout in starts) or occupy(starts)
    )
    run(decoder, [request(key, (5, 6), 3) for key in (8, 2, 5)])
    assert order == [(key, number) for key in (8, 2, 5) for number in range(3)]


def test_only_active_rows_are_decoded():
    decoder = SlotDecoder(tiny_model(), settings(6), slots=8)
    rows = count_decodes(decoder)
    run(decoder, [request(0, (5, 6), 3)])
    assert rows == [3] * 5


def test_deterministic_decodes_every_row_whatever_is_active():
    decoder = SlotDecoder(tiny_model(), settings(6), slots=8, deterministic=True, max_prompt_tokens=4)
    rows = count_decodes(decoder)
    run(decoder, [request(0, (5, 6), 3)])
    assert rows == [8] * 5


def test_cancelled_requests_free_their_slots_and_never_finish():
    decoder = SlotDecoder(tiny_model(), settings(6), slots=4)
    for key in range(3):
        decoder.submit(request(key, (5, 6), 3))
    decoder.step()
    assert (decoder.active_rollouts, decoder.waiting_requests) == (4, 1)
    decoder.cancel([0, 2, 99])
    assert (decoder.active_rollouts, decoder.waiting_requests) == (1, 0)
    assert list(run(decoder)) == [1]


def test_a_cancelled_id_may_be_submitted_again():
    decoder = SlotDecoder(tiny_model(), settings(6), slots=2)
    decoder.submit(request(0, (5, 6), 3))
    decoder.step()
    decoder.cancel([0])
    assert decoder.idle and decoder.step() == []
    assert len(run(decoder, [request(0, (5, 6), 3)])[0]) == 3


@hypothesis_settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.booleans(), st.integers(1, 5), st.sampled_from(["keep", "recompute"]))
def test_every_request_finishes_exactly_once_unless_cancelled(seed, deterministic, slots, mode):
    model, choose = tiny_model(), random.Random(seed)
    decoder = SlotDecoder(
        model, stopping(10), slots=slots, deterministic=deterministic, max_prompt_tokens=6, kv_on_publish=mode
    )
    texts = prompts(8, longest=6)
    submitted, cancelled, finished = 0, set(), []
    while submitted < len(texts) or not decoder.idle:
        for _ in range(choose.randint(0, 3)):
            if submitted < len(texts):
                decoder.submit(request(submitted, texts[submitted], choose.randint(1, 4)))
                submitted += 1
        if choose.randint(0, 9) == 0:
            gone = choose.randint(0, len(texts))
            if gone < submitted and gone not in {group.request_id for group in finished}:
                cancelled.add(gone)
            decoder.cancel([gone])
        if choose.randint(0, 4) == 0:
            decoder.set_version(decoder.version + 1)
        finished += decoder.step()
    assert sorted([group.request_id for group in finished] + list(cancelled)) == list(range(len(texts)))
    for group in finished:
        for rollout in group.rollouts:
            assert gap(model, texts[group.request_id], rollout).max() < 1e-4
            assert rollout.versions == sorted(rollout.versions)
