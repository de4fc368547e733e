"""The statistics against direct computation, and that they add up."""

import math
from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trl_a3po.objectives import (
    DecoupledStats,
    asympo_anchor,
    asympo_loss,
    decoupled_anchor,
    decoupled_loss,
    spo_anchor,
)
from trl_a3po.objectives import stats as stats_module

ANCHORS = [decoupled_anchor, asympo_anchor, spo_anchor]


def stats_of(anchor_of, batch):
    return anchor_of(*batch.args())[2]


def direct_metrics(w, r, rho, A, a, epsilon_low, epsilon_high, cap):
    """The token metrics of one set of tokens, from flat vectors."""
    metrics = {}
    for name, x in (("w", w), ("r", r), ("rho", rho)):
        metrics |= {f"{name}/mean": x.mean(), f"{name}/min": x.min(), f"{name}/max": x.max()}
    metrics["ess"] = rho.sum() ** 2 / (len(rho) * (rho**2).sum())
    metrics["clip/low"] = ((r < 1 - epsilon_low) & (A < 0)).double().mean()
    metrics["clip/high"] = ((r > 1 + epsilon_high) & (A > 0)).double().mean()
    metrics["w/capped"] = (w > cap).double().mean()
    metrics["interpolation_weight/mean"] = a.mean()
    return {key: value.item() for key, value in metrics.items()}


def test_token_metrics_equal_direct_computation_for_all_tokens_and_for_each_staleness(make_batch):
    batch = make_batch(rows=64)
    metrics = decoupled_anchor(*batch.args(), weight_cap=2.0, epsilon_low=0.1, epsilon_high=0.3)[2].metrics()
    d = batch.staleness.double()
    a = torch.where(d > 0, (d - 1) / d, 0)
    log_rho = batch.policy_logps - batch.behavior_logps
    A = batch.advantages.unsqueeze(1).expand_as(log_rho)
    columns = [(a * log_rho).exp(), ((1 - a) * log_rho).exp(), log_rho.exp(), A, a]
    whole = direct_metrics(*(x[batch.mask] for x in columns), 0.1, 0.3, 2.0)
    expected = {f"a3po/{key}": value for key, value in whole.items()}
    for value in range(9):
        tokens = batch.mask & (batch.staleness == value)
        split = direct_metrics(*(x[tokens] for x in columns), 0.1, 0.3, 2.0)
        expected |= {f"a3po/d{value}/{key}": number for key, number in split.items()}
        expected[f"a3po/d{value}/fraction"] = tokens.sum().item() / batch.mask.sum().item()
    ages = d[batch.mask]
    expected |= {"a3po/staleness/mean": ages.mean().item(), "a3po/staleness/min": 0, "a3po/staleness/max": 8}
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert 0 < metrics["a3po/clip/low"] < 1 and 0 < metrics["a3po/clip/high"] < 1 and 0 < metrics["a3po/w/capped"] < 1


def test_at_sequence_level_the_ratios_are_the_geometric_means_of_their_row(make_batch):
    batch = make_batch(spread=0.2)
    metrics = decoupled_anchor(*batch.args(), weight_level="sequence")[2].metrics()
    log_rho = (batch.policy_logps - batch.behavior_logps) * batch.mask
    lengths = batch.mask.sum(-1)
    rho = (log_rho.sum(-1) / lengths).exp()
    assert metrics["a3po/rho/mean"] == pytest.approx(((rho * lengths).sum() / lengths.sum()).item())
    assert metrics["a3po/rho/max"] == pytest.approx(rho.max().item())


def test_effective_sample_size_of_a_known_case():
    log_rho = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    zeros, ones = torch.zeros_like(log_rho), torch.ones(1, 2)
    _, _, stats = decoupled_anchor(log_rho, zeros, ones.int(), torch.ones(1), ones)
    assert stats.metrics()["a3po/ess"] == pytest.approx(16 / (2 * 10))


@pytest.mark.parametrize(("log_rho", "ess"), [(-math.inf, 0.0), (600.0, math.nan)])
def test_ratios_beyond_every_float_are_reported_and_do_not_stop_the_run(log_rho, ess):
    policy, ones = torch.full((1, 2), log_rho, dtype=torch.float64), torch.ones(1, 2)
    _, _, stats = decoupled_anchor(policy, torch.zeros_like(policy), ones.int(), torch.ones(1), ones)
    assert stats.metrics()["a3po/ess"] == pytest.approx(ess, nan_ok=True)


def test_scale_metrics_equal_direct_computation(make_batch):
    batch = make_batch(rows=32)
    policy = -batch.policy_logps.abs()
    S = -(policy * batch.mask).sum(-1) / batch.mask.sum(-1)
    floor = S.median().item()
    metrics = asympo_loss(policy, batch.advantages, batch.mask, min_scale=floor)[1].metrics()
    A, C = batch.advantages, 1 / S.clamp(min=floor)
    positive, negative = A > 0, A < 0
    expected = {
        "scale/mean": S.mean(),
        "scale/min": S.min(),
        "scale/max": S.max(),
        "coefficient/mean": C.mean(),
        "coefficient/min": C.min(),
        "coefficient/max": C.max(),
        "imbalance": (A * S).mean(),
        "scale/positive": (A * S)[positive].sum() / A[positive].sum(),
        "scale/negative": (A * S)[negative].sum() / A[negative].sum(),
        "floor": S.lt(floor).double().mean(),
    }
    assert metrics == pytest.approx({f"a3po/{key}": value.item() for key, value in expected.items()})
    assert 0 < metrics["a3po/floor"] < 1


def test_a_rows_staleness_is_that_of_its_oldest_token():
    policy, staleness = -torch.ones(2, 3), torch.tensor([[0, 3, 9], [1, 1, 1]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    metrics = asympo_anchor(policy, policy, staleness, torch.ones(2), mask)[2].metrics()
    assert metrics["a3po/staleness/max"] == 3 and metrics["a3po/staleness/min"] == 1
    assert metrics["a3po/d3/fraction"] == 0.5


@pytest.mark.parametrize("anchor_of", ANCHORS)
def test_the_split_by_staleness_sums_to_the_whole(make_batch, anchor_of):
    stats = stats_of(anchor_of, make_batch(rows=64))
    metrics = stats.metrics()
    seen = [d for d in range(9) if f"a3po/d{d}/fraction" in metrics]
    assert len(seen) > 1
    assert sum(metrics[f"a3po/d{d}/fraction"] for d in seen) == pytest.approx(1)
    for key in [key for key in metrics if key.endswith("/mean") and "/d" not in key and "staleness" not in key]:
        name = key.removeprefix("a3po/")
        parts = [metrics[f"a3po/d{d}/fraction"] * metrics[f"a3po/d{d}/{name}"] for d in seen]
        assert sum(parts) == pytest.approx(metrics[key], rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(cut=st.integers(1, 11), seed=st.integers(0, 100), anchor_of=st.sampled_from(ANCHORS))
def test_two_parts_of_a_batch_add_up_to_the_whole(make_batch, cut, seed, anchor_of):
    batch = make_batch(seed)
    parts = stats_of(anchor_of, batch.rows(slice(0, cut))) + stats_of(anchor_of, batch.rows(slice(cut, None)))
    assert parts.metrics() == pytest.approx(stats_of(anchor_of, batch).metrics(), rel=1e-12)


@pytest.mark.parametrize("anchor_of", ANCHORS)
def test_parts_of_different_largest_staleness_add_up_in_any_order(make_batch, anchor_of):
    stats = [stats_of(anchor_of, make_batch(seed, max_staleness=top)) for seed, top in enumerate((0, 8, 3))]
    forward, backward = reduce(add, stats).metrics(), reduce(add, stats[::-1]).metrics()
    assert forward == pytest.approx(backward, rel=1e-12)
    assert forward["a3po/staleness/min"] == 0


@pytest.mark.parametrize("anchor_of", ANCHORS)
def test_a_batch_without_tokens_adds_nothing(make_batch, anchor_of):
    batch = make_batch()
    stats, empty = stats_of(anchor_of, batch), stats_of(anchor_of, batch.but(mask=torch.zeros_like(batch.mask)))
    assert (empty + stats).metrics() == (stats + empty).metrics() == stats.metrics()


def test_without_a_staleness_there_is_no_split(make_batch):
    batch = make_batch()
    _, stats = decoupled_loss(
        batch.policy_logps, batch.behavior_logps, batch.behavior_logps, batch.advantages, batch.mask
    )
    assert not [key for key in stats.metrics() if "staleness" in key or "/d" in key]


def test_statistics_of_different_objectives_do_not_add(make_batch):
    batch = make_batch()
    with pytest.raises(ValueError, match="cannot be added"):
        stats_of(decoupled_anchor, batch) + stats_of(asympo_anchor, batch)
    with pytest.raises(ValueError, match="cannot be added"):
        stats_of(asympo_anchor, batch) + stats_of(spo_anchor, batch)


def test_statistics_hold_no_graph_and_no_per_token_tensor(make_batch):
    batch = make_batch()
    stats = stats_of(decoupled_anchor, batch.but(policy_logps=batch.fresh_policy()))
    assert not stats.sums.requires_grad
    assert stats.sums.shape == (len(stats.names), 9)


def test_statistics_do_not_depend_on_how_many_values_are_reduced_at_once(make_batch, monkeypatch):
    batch = make_batch()
    at_once = stats_of(decoupled_anchor, batch).metrics()
    monkeypatch.setattr(stats_module, "MOST_ENTRIES_ON_CPU", 1)
    assert stats_of(decoupled_anchor, batch).metrics() == pytest.approx(at_once, rel=1e-14)


class CountedOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_older_tokens_take_no_further_operations(make_batch):
    """On a GPU, the time of starting them is the time of the statistics."""
    counts = []
    for oldest in (1, 8):
        with CountedOperations() as operations:
            stats_of(decoupled_anchor, make_batch(max_staleness=oldest))
        counts.append(operations.count)
    assert counts[0] == counts[1]


def test_metrics_are_plain_floats(make_batch):
    metrics = stats_of(decoupled_anchor, make_batch()).metrics()
    assert {type(value) for value in metrics.values()} == {float}


def test_a_quantity_that_is_not_logged_raises():
    with pytest.raises(ValueError, match="DecoupledStats does not log W: the quantities that it logs are capped"):
        DecoupledStats.of({"W": torch.ones(1, 2)}, torch.ones(1, 2, dtype=torch.bool))


def test_a_weight_that_is_not_the_behavior_ratio_is_logged_as_it_is():
    rho, mask = torch.full((1, 2), 2.0), torch.ones(1, 2, dtype=torch.bool)
    stats = DecoupledStats.unclipped(rho, mask, torch.zeros_like(rho).long(), weight=rho**0.5, capped=~mask)
    metrics = stats.metrics()
    assert metrics["a3po/w/mean"] == pytest.approx(2**0.5) and metrics["a3po/rho/mean"] == 2.0
