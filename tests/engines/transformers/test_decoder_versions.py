"""A version is a fact: what was recorded is what the stamped weights give, in both modes of `kv_on_publish`."""

import pytest
import torch
from transformers import DynamicCache

from tests.engines.transformers.tiny_models import (
    clean_logps,
    gap,
    load,
    moved,
    prompts,
    request,
    run,
    settings,
    tiny_model,
)
from trl_a3po.engines.transformers.decoder import SlotDecoder

LENGTH = 10
TOLERANCE = 1e-4


def sample_with_swaps(
    name: str, mode: str, swaps: dict[int, int], *, length=LENGTH, slots=4, texts=2, rollouts=3, deterministic=False
):
    """Sample while the weights change: before step i, version `swaps[i]` is published.

    Returns `[(prompt, rollout)]` and the models by version.
    """
    first = tiny_model(name)
    versions = {0: first} | {v: moved(first, seed=100 + v) for v in swaps.values()}
    serving = tiny_model(name)
    decoder = SlotDecoder(
        serving, settings(length), slots=slots, kv_on_publish=mode, deterministic=deterministic, max_prompt_tokens=12
    )
    asked = prompts(texts)
    for i, text in enumerate(asked):
        decoder.submit(request(i, text, rollouts))
    groups, step = {}, 0
    while not decoder.idle:
        if step in swaps:
            load(serving, versions[swaps[step]])
            decoder.set_version(swaps[step])
        groups |= {group.request_id: group.rollouts for group in decoder.step()}
        step += 1
        assert step < 200
    return [(text, rollout) for i, text in enumerate(asked) for rollout in groups[i]], versions


@torch.no_grad()
def replay_logps(versions: dict, prompt, rollout) -> torch.Tensor:
    """Log-probs `(T,)` when the cache is built token by token, each under the weights that were serving then."""
    cache = DynamicCache()
    step, logps = list(prompt), []
    for token, version in zip(rollout.token_ids, rollout.versions, strict=True):
        out = versions[version](input_ids=torch.tensor([step]), past_key_values=cache, use_cache=True)
        logps.append(out.logits[0, -1].float().log_softmax(-1)[token])
        step = [token]
    return torch.stack(logps)


# The first step samples two tokens of a new rollout, each later step one: a rollout of 10 tokens lasts 9 steps.
SWAPS = [{1: 1}, {3: 1}, {8: 1}, {2: 1, 5: 2}, {2: 1, 3: 2, 4: 3}, {1: 1, 8: 2}]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gemma3-sliding", "gpt2"])
@pytest.mark.parametrize("swaps", SWAPS)
def test_recompute_agrees_with_a_clean_forward_under_the_stamp_and_no_other(name, swaps, deterministic):
    pairs, versions = sample_with_swaps(name, "recompute", swaps, slots=4, deterministic=deterministic)
    assert {v for _, rollout in pairs for v in rollout.versions} == set(versions)
    stamps = torch.cat([torch.tensor(rollout.versions) for _, rollout in pairs])
    for version, model in versions.items():
        error = torch.cat([gap(model, text, rollout) for text, rollout in pairs])
        assert error[stamps == version].max() < TOLERANCE
        for other in set(versions) - {version}:
            assert error[stamps == other].median() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gpt2"])
@pytest.mark.parametrize("swaps", SWAPS)
def test_keep_agrees_with_a_replay_that_builds_the_cache_segment_by_segment(name, swaps):
    pairs, versions = sample_with_swaps(name, "keep", swaps)
    gaps = []
    for text, rollout in pairs:
        recorded = torch.tensor(rollout.logps)
        assert (recorded - replay_logps(versions, text, rollout)).abs().max() < TOLERANCE
        for version, model in versions.items():
            after = torch.tensor(rollout.versions) == version
            if version > rollout.versions[0] and after.any():
                gaps.append(gap(model, text, rollout)[after].max())
    assert max(gaps) > 100 * TOLERANCE


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_completion_of_one_version_agrees_with_a_clean_forward_in_both_modes(mode):
    pairs, versions = sample_with_swaps("llama", mode, {3: 1, 11: 2, 12: 3}, slots=2, texts=4, rollouts=2)
    pure = [(text, rollout) for text, rollout in pairs if len(set(rollout.versions)) == 1]
    assert pure
    for text, rollout in pure:
        assert gap(versions[rollout.versions[0]], text, rollout).max() < TOLERANCE


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_completions_of_one_token_carry_the_version_of_their_prefill(mode):
    """One slot: every rollout waits for the one before it, so versions change between them."""
    serving, text = tiny_model(), prompts(1)[0]
    versions = {0: tiny_model(), 1: moved(tiny_model(), 1), 2: moved(tiny_model(), 2)}
    decoder = SlotDecoder(serving, settings(1), slots=1, kv_on_publish=mode)
    for version, model in versions.items():
        load(serving, model)
        decoder.set_version(version)
        [rollout] = run(decoder, [request(version, text)])[version]
        assert rollout.versions == [version]
        for other in versions.values():
            error = gap(other, text, rollout).max()
            assert error < TOLERANCE if other is model else error > 100 * TOLERANCE


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_the_swap_may_come_between_the_last_two_tokens(mode):
    pairs, versions = sample_with_swaps("llama", mode, {LENGTH - 2: 1}, slots=6)
    for text, rollout in pairs:
        assert rollout.versions == [0] * (LENGTH - 1) + [1]
        assert (torch.tensor(rollout.logps) - clean_logps(versions[0], text, rollout.token_ids)).abs()[
            :-1
        ].max() < 1e-4


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_rollouts_of_a_group_that_start_after_a_publish_start_under_the_new_weights(mode):
    serving, new, text = tiny_model(), moved(tiny_model()), prompts(1)[0]
    decoder = SlotDecoder(serving, settings(4), slots=1, kv_on_publish=mode)
    decoder.submit(request(0, text, 2))
    decoder.step()
    load(serving, new)
    decoder.set_version(1)
    _, second = run(decoder)[0]
    assert second.versions == [1] * 4
    assert gap(new, text, second).max() < TOLERANCE


def test_several_publishes_between_two_steps_recompute_once_under_the_last():
    serving, last, text = tiny_model(), moved(tiny_model(), 2), prompts(1)[0]
    decoder = SlotDecoder(serving, settings(6), slots=2, kv_on_publish="recompute")
    decoder.submit(request(0, text, 2))
    decoder.step()
    for version, model in ((1, moved(tiny_model(), 1)), (2, last)):
        load(serving, model)
        decoder.set_version(version)
    forwards = []
    prefill = decoder._forward.prefill_cache
    decoder._forward.prefill_cache = lambda *args, **kwargs: forwards.append(1) or prefill(*args, **kwargs)
    for rollout in run(decoder)[0]:
        assert rollout.versions == [0, 0, 2, 2, 2, 2]
        assert gap(last, text, rollout)[2:].max() < TOLERANCE
    assert len(forwards) == 1


def test_a_version_older_than_sequences_in_flight_is_refused():
    decoder = SlotDecoder(tiny_model(), settings(6), slots=2, version=5)
    decoder.submit(request(0, (4, 5)))
    decoder.step()
    with pytest.raises(ValueError, match="version=4 is older than 5"):
        decoder.set_version(4)
    decoder.cancel([0])
    decoder.set_version(4)
    assert decoder.version == 4
