"""The noise, the filters against those of transformers, and the frequencies of what is drawn."""

import numpy as np
import pytest
import torch
from transformers.generation import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.engines.transformers.tiny_models import settings
from trl_a3po.engines.transformers.sampling import Sampler, noise_stream, outside_top_p, uniform_noise

CPU = torch.device("cpu")
FIXED_STREAM, FIXED_NOISE = 15020427595393229491, 0.6011138578855384


def streams(seeds, keys, rollouts) -> np.ndarray:
    return np.array([noise_stream(s, k, r) for s in seeds for k in keys for r in rollouts], dtype=np.uint64)


def grid(seeds=(0,), keys=range(8), rollouts=range(8), positions=256) -> np.ndarray:
    """Noise `(streams, positions)`."""
    rows = streams(seeds, keys, rollouts)
    at = np.tile(np.arange(positions), len(rows))
    return uniform_noise(np.repeat(rows, positions), at).reshape(len(rows), positions)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Distance from the expectation in standard deviations of the chi-square statistic."""
    freedom = observed.size - 1
    return (((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def test_noise_lies_strictly_inside_the_unit_interval():
    noise = grid()
    assert noise.min() > 0 and noise.max() < 1
    assert (noise * 1.4999999 < 1.4999999).all()


def test_noise_is_uniform():
    counts = np.histogram(grid(), bins=128, range=(0, 1))[0]
    assert abs(chi_square(counts, counts.sum() / 128)) < 5


@pytest.mark.parametrize("neighbour", ["position", "rollout", "noise_key", "seed"])
def test_noise_of_neighbours_is_independent(neighbour):
    if neighbour == "position":
        noise = grid()
        left, right = noise[:, :-1], noise[:, 1:]
    elif neighbour == "rollout":
        noise = grid(keys=range(4), rollouts=range(16)).reshape(4, 16, 256)
        left, right = noise[:, :-1], noise[:, 1:]
    elif neighbour == "noise_key":
        noise = grid(keys=range(16), rollouts=range(4)).reshape(16, 4, 256)
        left, right = noise[:-1], noise[1:]
    else:
        noise = grid(seeds=range(16), keys=range(2), rollouts=range(2)).reshape(16, 4, 256)
        left, right = noise[:-1], noise[1:]
    pairs = np.histogram2d(left.ravel(), right.ravel(), bins=8, range=[[0, 1], [0, 1]])[0]
    assert abs(chi_square(pairs, pairs.sum() / 64)) < 5


def test_no_two_coordinates_share_a_stream():
    rows = streams(range(10), range(-5, 30), range(30))
    assert len(set(rows.tolist())) == len(rows)


def test_noise_of_a_coordinate_is_fixed():
    """A change of the noise breaks the reproduction of earlier runs: it must be deliberate."""
    assert noise_stream(1, 2, 3) == FIXED_STREAM
    assert uniform_noise(np.array([FIXED_STREAM], dtype=np.uint64), np.array([4]))[0] == FIXED_NOISE


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"suppress_token_ids": (3, 9)},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
    ],
)
def test_drawn_frequencies_are_the_filtered_distribution(changes):
    torch.manual_seed(0)
    logits = torch.randn(1, 24) * 1.5
    sampler = Sampler(settings(**changes), 24, CPU)
    noise = torch.from_numpy(grid(seeds=(2,)).ravel())
    tokens = sampler.draw(logits.expand(len(noise), -1), noise)[0].long()
    probs = sampler.scores(logits, None, None).softmax(-1)[0].double()
    counts = torch.bincount(tokens, minlength=24).double()
    assert (counts[probs == 0] == 0).all()
    likely = probs > 1e-3
    assert abs(chi_square(counts[likely].numpy(), (probs[likely] * len(noise)).numpy())) < 5


def hf_scores(changes: dict, logits: torch.Tensor, ids: torch.Tensor, prompt_length: int) -> torch.Tensor:
    chain = LogitsProcessorList()
    if "repetition_penalty" in changes:
        chain.append(RepetitionPenaltyLogitsProcessor(changes["repetition_penalty"]))
    if "min_new_tokens" in changes:
        stops = list(changes["stop_token_ids"])
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, changes["min_new_tokens"], stops, device="cpu"))
    if "suppress_token_ids" in changes:
        chain.append(SuppressTokensLogitsProcessor(list(changes["suppress_token_ids"])))
    if "temperature" in changes:
        chain.append(TemperatureLogitsWarper(changes["temperature"]))
    if "top_k" in changes:
        chain.append(TopKLogitsWarper(changes["top_k"]))
    if "top_p" in changes:
        chain.append(TopPLogitsWarper(changes["top_p"]))
    if "min_p" in changes:
        chain.append(MinPLogitsWarper(changes["min_p"]))
    return chain(ids, logits.clone())


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5},
        {"top_k": 500},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"suppress_token_ids": (1, 8)},
        {"stop_token_ids": (2, 5), "min_new_tokens": 4},
        {"stop_token_ids": (2, 5), "min_new_tokens": 3},
        {"temperature": 0.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
        {
            "repetition_penalty": 1.2,
            "stop_token_ids": (2,),
            "min_new_tokens": 4,
            "suppress_token_ids": (1,),
            "temperature": 1.5,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": 0.05,
        },
    ],
)
def test_scores_are_those_of_transformers(changes):
    torch.manual_seed(1)
    rows, vocabulary, prompt_length, generated = 16, 64, 4, 3
    logits = torch.randn(rows, vocabulary) * 2
    ids = torch.randint(0, vocabulary, (rows, prompt_length + generated))
    sampler = Sampler(settings(**changes), vocabulary, CPU)
    seen = torch.zeros(rows, vocabulary, dtype=torch.bool).scatter_(1, ids, True)
    too_early = torch.full((rows,), generated < changes.get("min_new_tokens", 0))
    ours = sampler.scores(logits, too_early, seen)
    theirs = hf_scores(changes, logits, ids, prompt_length)
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("top_p", [1e-6, 0.05, 0.3, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("levels", [1, 3, 40, None])
def test_top_p_removes_what_a_sort_of_the_row_removes(top_p, levels):
    """Also where probabilities are equal, which are removed in the order of their ids."""
    torch.manual_seed(2)
    logits = torch.randn(64, 300) * 3
    if levels is not None:
        logits = torch.randint(0, levels, (64, 300)).float() / 4
    probs = logits.softmax(1)
    ascending, order = probs.sort(dim=1, stable=True)
    mass = ascending.double().cumsum(1)
    expected = mass <= 1 - top_p
    expected[:, -1] = False
    undecided = (mass - (1 - top_p)).abs() < 1e-6  # by rounding
    outside = outside_top_p(probs, top_p).gather(1, order)
    assert torch.equal(outside | undecided, expected | undecided)
    assert undecided.float().mean() < 0.01


def test_only_rows_that_are_too_early_are_kept_from_stopping():
    sampler = Sampler(settings(stop_token_ids=(2,), min_new_tokens=4), 8, CPU)
    scores = sampler.scores(torch.zeros(2, 8), torch.tensor([True, False]), None)
    assert scores[0, 2] == -torch.inf and scores[1, 2] == 0


def test_a_row_is_drawn_alike_alone_and_in_a_batch():
    torch.manual_seed(0)
    logits = torch.randn(8, 501)
    noise = torch.rand(8, dtype=torch.float64)
    sampler = Sampler(settings(top_k=50, top_p=0.9, min_p=0.01), 501, CPU)
    together = sampler.draw(logits, noise)
    alone = torch.cat([sampler.draw(logits[i : i + 1], noise[i : i + 1]) for i in range(8)], dim=1)
    assert torch.equal(together, alone)


def test_extreme_noise_draws_only_tokens_that_can_be_drawn():
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2:4] = 0.0
    drawn = Sampler(settings(), 6, CPU).draw(logits, torch.tensor([2.0**-49, 1 - 2.0**-49], dtype=torch.float64))
    assert drawn[0].tolist() == [2, 3]


def test_logits_that_are_not_finite_give_a_log_prob_that_is_not():
    logits = torch.zeros(2, 6)
    logits[1, 3] = torch.nan
    logps = Sampler(settings(), 6, CPU).draw(logits, torch.full((2,), 0.5, dtype=torch.float64))[1]
    assert logps.isfinite().tolist() == [True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"min_new_tokens": 9}, "min_new_tokens=9"),
        ({"stop_token_ids": (8,)}, "stop_token_ids=.8,."),
        ({"suppress_token_ids": tuple(range(8))}, "leave a token"),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        Sampler(settings(**changes), 8, CPU)
