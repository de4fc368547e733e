"""Cap modes and levels of the behavior weight, against a ten-line reference and published cases."""

import math

import pytest
import torch

from trl_a3po.objectives import behavior_weight


def reference_weight(lp, lb, mask, cap, mode, level):
    """Token by token, in Python floats."""
    rows = []
    for lp_row, lb_row, mask_row in zip(lp.tolist(), lb.tolist(), mask.tolist(), strict=True):
        logs = [p - b for p, b, m in zip(lp_row, lb_row, mask_row, strict=True) if m]
        if level == "sequence":
            logs = [math.fsum(logs) / len(logs)] * len(logs)
        weights = [math.exp(log) for log in logs]
        if mode == "truncate":
            weights = [min(w, cap) for w in weights]
        if mode == "mask":
            weights = [w if w <= cap else 0.0 for w in weights]
        rows.append(weights)
    return rows


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "none"])
@pytest.mark.parametrize("cap", [1.1, 2.0, 5.0])
def test_every_mode_and_level_equals_the_reference(make_batch, cap, mode, level):
    batch = make_batch(spread=2.0)
    lp, lb, mask = batch.policy_logps, batch.behavior_logps, batch.mask
    weight, _ = behavior_weight(lp, lb, mask, cap=cap, mode=mode, level=level)
    got = [row[kept].tolist() for row, kept in zip(weight, mask, strict=True)]
    expected = reference_weight(lp, lb, mask, cap, mode, level)
    assert [len(row) for row in got] == [len(row) for row in expected]
    for got_row, expected_row in zip(got, expected, strict=True):
        assert got_row == pytest.approx(expected_row, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("log_ratios", "cap", "mode", "level", "expected"),
    [
        ([0, 1, 0], 2.0, "mask", "token", [1, 0, 1]),
        ([0, 2, -0.5], 5.0, "mask", "token", [1, 0, math.exp(-0.5)]),
        ([0, 2, -0.5], 5.0, "truncate", "token", [1, 5, math.exp(-0.5)]),
        ([0, 4, 0], 3.0, "truncate", "sequence", [3, 3, 3]),
        ([0, 4, 0], 3.0, "mask", "sequence", [0, 0, 0]),
        ([0, 0.5, 1], 5.0, "truncate", "sequence", [math.exp(0.5)] * 3),
        ([0.75, 0.875, 0], 2.0, "mask", "token", [0, 0, 1]),
        ([0.75, 0.875, 0], 5.0, "mask", "token", [math.exp(0.75), math.exp(0.875), 1]),
    ],
)
def test_published_cases(log_ratios, cap, mode, level, expected):
    lp = torch.tensor([log_ratios], dtype=torch.float64)
    weight, _ = behavior_weight(lp, torch.zeros_like(lp), torch.ones(1, 3), cap=cap, mode=mode, level=level)
    assert weight.tolist()[0] == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_weight_of_exactly_the_cap_is_kept_and_not_counted_as_capped(mode):
    lp = torch.tensor([[1.0]], dtype=torch.float64)
    cap = lp.exp().item()
    weight, stats = behavior_weight(lp, torch.zeros_like(lp), torch.ones(1, 1), cap=cap, mode=mode)
    assert weight.item() == cap
    assert stats.metrics()["a3po/w/capped"] == 0


def test_the_sequence_weight_ignores_padding_and_reaches_the_whole_row():
    lp = torch.tensor([[1.0, 2.0, 100.0]])
    weight, _ = behavior_weight(lp, torch.zeros_like(lp), torch.tensor([[1, 1, 0]]), level="sequence")
    torch.testing.assert_close(weight, torch.full((1, 3), math.exp(1.5)))


def test_statistics_are_of_the_weight_before_its_cap():
    lp = torch.tensor([[0.0, 2.0, 1.0, 9.0]], dtype=torch.float64)
    _, stats = behavior_weight(lp, torch.zeros_like(lp), torch.tensor([[1, 1, 1, 0]]), cap=2.5)
    metrics = stats.metrics()
    assert metrics["a3po/w/max"] == pytest.approx(math.exp(2))
    assert metrics["a3po/w/min"] == 1
    assert metrics["a3po/w/mean"] == pytest.approx((1 + math.exp(2) + math.exp(1)) / 3)
    assert metrics["a3po/w/capped"] == pytest.approx(2 / 3)


def test_the_weight_carries_no_gradient():
    lp = torch.zeros(1, 2, requires_grad=True)
    weight, _ = behavior_weight(lp, torch.zeros(1, 2), torch.ones(1, 2))
    assert not weight.requires_grad


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("cap", [1.0, 0.5, None, math.inf, math.nan])
def test_a_cap_that_is_not_above_one_is_refused(cap, mode):
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match=f"cap is {cap}, but with mode='{mode}' it must be a finite number above 1"):
        behavior_weight(ones, ones, ones, cap=cap, mode=mode)


def test_without_a_cap_its_value_does_not_matter():
    ones = torch.ones(1, 1)
    weight, _ = behavior_weight(9 * ones, ones, ones, cap=None, mode="none")
    assert weight.item() == pytest.approx(math.exp(8))


def test_unknown_names_are_refused_with_the_options():
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="mode='clamp' is unknown: set one of 'truncate', 'mask', 'none'"):
        behavior_weight(ones, ones, ones, mode="clamp")
    with pytest.raises(ValueError, match="level='row' is unknown: set one of 'token', 'sequence'"):
        behavior_weight(ones, ones, ones, level="row")


def test_log_probs_that_do_not_match_the_mask_are_refused():
    with pytest.raises(ValueError, match=r"behavior_logps has shape \(1, 3\) but mask has \(1, 2\)"):
        behavior_weight(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))
