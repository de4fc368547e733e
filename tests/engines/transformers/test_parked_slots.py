"""Slots that are parked while a tool runs: an extended slot samples what a prefill of the whole would sample."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from tests.engines.transformers.taped import captured
from tests.engines.transformers.tiny_models import gap, load, moved, prompts, request, run, settings, tiny_model
from tests.tiny import VOCAB
from trl_a3po.engines.transformers.decoder import SlotDecoder

pytestmark = pytest.mark.long

LENGTH = 24
# Whether the cache, the mask or the positions of a family are its own.
FAMILIES = [
    *("llama", "llama-eager", "gpt2", "opt", "qwen3", "mixtral-sliding", "deepseek_v3"),
    *("mistral-sliding", "qwen2-sliding", "gemma2-sliding", "gemma3-sliding"),
]


class Forwards:
    """Counts the sequences that `decoder` prefills and extends."""

    def __init__(self, decoder: SlotDecoder):
        self.prefilled = self.extended = 0
        forward = decoder._forward
        prefill, extend = forward.prefill, forward.extend

        def counted_prefill(sequences, *args):
            self.prefilled += len(sequences)
            return prefill(sequences, *args)

        def counted_extend(sequences, *args):
            self.extended += len(sequences)
            return extend(sequences, *args)

        forward.prefill, forward.extend = counted_prefill, counted_extend


def turn_after(first, number: int, known, *, request_id: int, tokens: int, episodes: bool = True):
    """The request for the next turn of rollout `number` of `first`, whose completion so far is `known`."""
    return replace(
        first, request_id=request_id, prompt_ids=(*first.prompt_ids, *known), num_rollouts=1, first_rollout=number,
        first_position=len(known), max_new_tokens=tokens,
        first_episode=first.first_episode + number if episodes else None,
    )  # fmt: skip


def play(decoder, *, episodes: bool, turns=3, rollouts=2, before=lambda turn: None):
    """Two groups whose rollouts have several turns, with results of tools of 1 to 5 tokens in between. Returns each
    rollout as `[(what is new before the turn, turn)]`."""
    first = [
        replace(request(i, text, rollouts), max_new_tokens=3 + i, first_episode=10 * i)
        for i, text in enumerate(prompts(2))
    ]
    before(0)
    begun = [one if episodes else replace(one, first_episode=None) for one in first]
    results = run(decoder, begun)
    played = [[(one.prompt_ids, turn)] for one in first for turn in results[one.request_id]]
    noise = random.Random(5)
    for turn in range(1, turns):
        before(turn)
        requests = []
        for place, parts in enumerate(played):
            result = tuple(noise.randrange(3, VOCAB) for _ in range(noise.randint(1, 5)))
            known = [token for new, rollout in parts for token in (*new, *rollout.token_ids)] + [*result]
            one, number = first[place // rollouts], place % rollouts
            requests.append(
                turn_after(
                    one, number, known[len(one.prompt_ids) :], request_id=100 * turn + place,
                    tokens=noise.randint(1, 4), episodes=episodes,
                )
            )  # fmt: skip
            parts.append((result, None))
        results = run(decoder, requests)
        for place, parts in enumerate(played):
            parts[-1] = (parts[-1][0], results[100 * turn + place][0])
    return played


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        for (_, one), (_, two) in zip(mine, other, strict=True):
            assert (one.token_ids, one.versions, one.finish_reason) == (two.token_ids, two.versions, two.finish_reason)
            torch.testing.assert_close(one.logps, two.logps, atol=1e-5, rtol=0)


@torch.no_grad()
def replayed_logps(models, parts) -> torch.Tensor:
    """Log-probs of the sampled tokens of a rollout, when its cache is built token by token, each token read by the
    weights of the next one's version."""
    cache, unread, logps = DynamicCache(), [], []
    for new, turn in parts:
        unread += new
        for token, version in zip(turn.token_ids, turn.versions, strict=True):
            out = models[version](input_ids=torch.tensor([unread]), past_key_values=cache, use_cache=True)
            logps.append(out.logits[0, -1].float().log_softmax(-1)[token])
            unread = [token]
    return torch.stack(logps)


def clean_gaps(models, parts) -> torch.Tensor:
    """|recorded - clean| of each sampled token, by one forward over everything before the turn and the turn."""
    known, gaps = [], []
    for new, turn in parts:
        known += new
        of = {version: gap(models[version], known, turn) for version in set(turn.versions)}
        gaps += [of[version][place] for place, version in enumerate(turn.versions)]
        known += turn.token_ids
    return torch.stack(gaps)


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"repetition_penalty": 1.2, "top_p": 0.95, "min_new_tokens": 2}])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_extended_slot_samples_what_a_prefill_of_the_whole_samples(name, sampling):
    model = tiny_model(name)
    stops = settings(LENGTH, stop_token_ids=tuple(range(50, VOCAB)), **sampling)
    decoder = SlotDecoder(model, stops, slots=5)
    forwards = Forwards(decoder)
    ours = play(decoder, episodes=True)
    assert (forwards.prefilled, forwards.extended) == (2, 8)
    assert_same(ours, play(SlotDecoder(model, stops, slots=5), episodes=False))


@pytest.mark.parametrize("slots", [4, 7])
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gpt2"])
def test_captured_steps_leave_what_is_parked_alone(name, slots):
    model, stops = tiny_model(name), settings(LENGTH, stop_token_ids=tuple(range(50, VOCAB)))
    decoder = SlotDecoder(model, stops, slots=slots)
    capture, forwards = captured(decoder), Forwards(decoder)
    ours = play(decoder, episodes=True, turns=5)
    assert capture.replays > 0 and forwards.extended == 16
    assert_same(ours, play(SlotDecoder(model, stops, slots=slots), episodes=False, turns=5))


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gpt2"])
def test_weights_may_be_published_while_a_tool_runs(name, mode, capture):
    models = {0: tiny_model(name), 1: moved(tiny_model(name), 1), 2: moved(tiny_model(name), 2)}
    serving = tiny_model(name)
    decoder = SlotDecoder(serving, settings(LENGTH), slots=4, kv_on_publish=mode)
    if capture:
        captured(decoder)
    forwards = Forwards(decoder)

    def publish(turn):
        if turn:
            load(serving, models[turn])
            decoder.set_version(turn)

    played = play(decoder, episodes=True, before=publish)
    assert (forwards.prefilled, forwards.extended) == ((2, 8) if mode == "keep" else (10, 0))
    assert decoder.turns_prefilled_again == (0 if mode == "keep" else 8)
    for parts in played:
        assert [set(turn.versions) for _, turn in parts] == [{0}, {1}, {2}]
        recorded = torch.tensor([logp for _, turn in parts for logp in turn.logps])
        kept, clean = (recorded - replayed_logps(models, parts)).abs(), clean_gaps(models, parts)
        later = slice(len(parts[0][1].logps), None)
        (right, wrong) = (kept, clean) if mode == "keep" else (clean, kept)
        assert right.max() < 1e-5 and wrong[later].max() > 1e-3


def one_turn(decoder, episode: int, tokens=3, text=(5, 6, 7), **changes):
    """The first turn of an episode, and the request for its second one."""
    first = replace(request(2 * episode, text), max_new_tokens=tokens, first_episode=episode)
    (rollout,) = run(decoder, [first])[2 * episode]
    return turn_after(first, 0, [*rollout.token_ids, 9], request_id=2 * episode + 1, tokens=tokens, **changes)


def clean(model, asked):
    """The turn by a decoder that keeps nothing."""
    return run(SlotDecoder(model, settings(LENGTH), slots=1), [asked])[asked.request_id]


@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_turn_that_does_not_begin_with_what_the_slot_holds_is_prefilled(place):
    model = tiny_model()
    decoder = SlotDecoder(model, settings(LENGTH), slots=2)
    asked = one_turn(decoder, 0)
    rewritten = list(asked.prompt_ids)
    rewritten[place] = (rewritten[place] + 1) % VOCAB
    asked = replace(asked, prompt_ids=tuple(rewritten))
    forwards = Forwards(decoder)
    assert_same([[((), one)] for one in run(decoder, [asked])[1]], [[((), one)] for one in clean(model, asked)])
    assert (forwards.prefilled, forwards.extended) == (1, 0)


def test_a_turn_may_add_nothing_or_be_shorter_than_what_the_slot_holds():
    model = tiny_model()
    for cut in (1, 2):
        decoder = SlotDecoder(model, settings(LENGTH), slots=2)
        asked = one_turn(decoder, 0)
        asked = replace(asked, prompt_ids=asked.prompt_ids[:-cut])
        forwards = Forwards(decoder)
        assert_same([[((), one)] for one in run(decoder, [asked])[1]], [[((), one)] for one in clean(model, asked)])
        assert (forwards.prefilled, forwards.extended) == ((0, 1) if cut == 1 else (1, 0))


def test_a_parked_slot_is_free_for_others_and_the_one_parked_longest_is_taken_first():
    model = tiny_model()
    decoder = SlotDecoder(model, settings(LENGTH), slots=2)
    asked = [one_turn(decoder, episode, text=text) for episode, text in enumerate(prompts(2))]
    run(decoder, [replace(request(50, (8, 9)), max_new_tokens=2)])
    forwards = Forwards(decoder)
    for one in asked:
        assert_same([[((), rollout)] for rollout in run(decoder, [one])[one.request_id]], [[((), *clean(model, one))]])
    assert (forwards.prefilled, forwards.extended) == (1, 1) and decoder.turns_prefilled_again == 1


def test_episodes_that_wait_hold_no_slot_and_their_turns_come_before_prompts():
    decoder = SlotDecoder(tiny_model(), settings(LENGTH), slots=2)
    asked = [one_turn(decoder, episode) for episode in range(2)]
    assert decoder.active_rollouts == 0 and decoder.idle
    decoder.submit(replace(request(50, (8, 9), 3), max_new_tokens=9))
    decoder.step()
    assert decoder.active_rollouts == 2  # a prompt took the slots, and both are decoding
    for one in asked:
        decoder.submit(one)
    ended = []
    while not decoder.idle:
        ended += [group.request_id for group in decoder.step()]
    assert ended == [1, 3, 50]


def test_a_turn_whose_slot_is_parked_begins_at_once_and_takes_no_other_turns_slot():
    decoder = SlotDecoder(tiny_model(), settings(LENGTH), slots=2)
    parked = [one_turn(decoder, episode) for episode in range(2)]
    forwards = Forwards(decoder)
    lost = replace(parked[0], request_id=70, first_episode=70)  # an earlier engine had sampled its first turn
    ended = list(run(decoder, [lost, *parked]))
    assert set(ended[:2]) == {1, 3} and (forwards.prefilled, forwards.extended) == (1, 2)


@pytest.mark.parametrize("end", ["end_episodes", "same_version"])
def test_nothing_is_kept_of_an_episode_that_is_over_nor_across_a_publish_of_the_same_version(end):
    model = tiny_model()
    decoder = SlotDecoder(model, settings(LENGTH), slots=2)
    asked = one_turn(decoder, 0)
    if end == "end_episodes":
        decoder.end_episodes([0, 99])
    else:
        decoder.set_version(0)
    forwards = Forwards(decoder)
    run(decoder, [asked])
    assert (forwards.prefilled, forwards.extended) == (1, 0)


def test_a_deterministic_decoder_keeps_nothing():
    """Whether a slot was taken by somebody else must not show in the bits of an episode's next turn."""
    decoder = SlotDecoder(tiny_model(), settings(LENGTH), slots=2, deterministic=True, max_prompt_tokens=12)
    asked = one_turn(decoder, 0)
    forwards = Forwards(decoder)
    run(decoder, [asked])
    assert (forwards.prefilled, forwards.extended) == (1, 0)


def test_rollouts_without_an_episode_are_not_parked():
    decoder = SlotDecoder(tiny_model(), settings(4), slots=2)
    run(decoder, [request(0, (5, 6), 2)])
    assert not any(slot in decoder._parked for slot in range(2))


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("seed", range(4))
def test_random_episodes_over_few_slots_record_what_a_clean_forward_gives(seed, mode, capture):
    """Episodes of random turns, tools of random length, slots that run short, cancelled and ended episodes, and, where
    a clean forward can tell, publishes."""
    noise = random.Random(seed)
    models = {0: tiny_model()} | {version: moved(tiny_model(), version) for version in (1, 2, 3)}
    serving = tiny_model()
    stops = settings(40, stop_token_ids=tuple(range(50, VOCAB)))
    decoder = SlotDecoder(serving, stops, slots=noise.randint(2, 6), kv_on_publish=mode)
    if capture:
        captured(decoder)
    forwards = Forwards(decoder)
    first = {
        i: replace(request(i, text), max_new_tokens=noise.randint(1, 6), first_episode=i)
        for i, text in enumerate(prompts(12))
    }
    parts = {i: [(one.prompt_ids, None)] for i, one in first.items()}
    left = {i: noise.randint(1, 4) for i in first}  # turns
    due: dict[int, list] = {step: [] for step in range(300)}  # requests by the step in which their tool returns
    owner = {}
    for i, one in first.items():
        due[noise.randint(0, 12)].append((i, one))
    for step, requests in due.items():
        if mode == "recompute" and step in (6, 13, 20):
            version = {6: 1, 13: 2, 20: 3}[step]
            load(serving, models[version])
            decoder.set_version(version)
        for i, one in requests:
            owner[one.request_id] = i
            decoder.submit(one)
        if step == 9:
            decoder.cancel([0])
            decoder.end_episodes([0])
            left[0] = 0
        for group in decoder.step():
            i = owner[group.request_id]
            parts[i][-1] = (parts[i][-1][0], group.rollouts[0])
            left[i] -= 1
            if left[i] <= 0:
                decoder.end_episodes([i])
                continue
            result = tuple(noise.randrange(3, VOCAB) for _ in range(noise.randint(1, 6)))
            known = [token for new, turn in parts[i] for token in (*new, *turn.token_ids)] + [*result]
            parts[i].append((result, None))
            after = turn_after(
                first[i], 0, known[len(first[i].prompt_ids) :], request_id=1000 + len(owner) + step,
                tokens=noise.randint(1, 6),
            )  # fmt: skip
            after = replace(after, first_episode=i, request_id=1000 + 50 * step + i)
            due[step + noise.randint(1, 8)].append((i, after))
    assert decoder.idle and forwards.extended > 0
    for i, turns in parts.items():
        if i:
            assert all(turn is not None for _, turn in turns)
            assert clean_gaps(models, turns).max() < 1e-4


def test_a_parked_slot_between_decoded_ones_is_left_alone():
    """Captured steps have 6 rows for 5 rollouts, so that the first row, which is parked, is among them."""
    model = tiny_model()
    decoder = SlotDecoder(model, settings(LENGTH), slots=6)
    captured(decoder)
    forwards = Forwards(decoder)
    first = replace(request(0, (5, 6, 7)), max_new_tokens=2, first_episode=0)
    for one in (first, *(replace(request(1 + i, text), max_new_tokens=12) for i, text in enumerate(prompts(5)))):
        decoder.submit(one)
    ended: dict[int, list] = {}
    while 0 not in ended:
        ended |= {group.request_id: group.rollouts for group in decoder.step()}
    for _ in range(4):
        decoder.step()
    assert 0 in decoder._parked and decoder.active_rollouts == 5
    asked = turn_after(first, 0, [*ended[0][0].token_ids, 9], request_id=50, tokens=6)
    (turn,) = run(decoder, [asked])[50]
    assert forwards.extended == 1
    assert_same([[((), turn)]], [[((), *clean(model, asked))]])
