"""The proximal policy against published numbers, its limits and an independent float64 formula."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_a3po.objectives import behavior_weight, proximal_logps, token_staleness

LOG = math.log


@pytest.mark.parametrize(
    ("method", "lb", "lt", "versions", "version", "expected"),
    [
        ("loglinear", [-1, -2, -3], [-1.5, -2.5, -3.5], [0, 0, 0], 2, [-1.25, -2.25, -3.25]),
        ("loglinear", [-1], [-2], [4], 5, [-1]),
        ("loglinear", [-1, -2], [-1.5, -2.2], [0, 2], 4, [-1.375, -2.1]),
        ("linear", [LOG(0.5)], [LOG(0.25)], [0], 2, [LOG(0.375)]),
        ("loglinear", [-1], [-2], [3], 3, [-1]),
        ("loglinear", [-1, -2, -3], [-1.5, -2.5, -3.5], [-1, 0, 1], 3, [-1, -2 - 0.5 * 2 / 3, -3.25]),
        ("behavior", [-1, -2], [-1.5, -2.5], [0, 0], 2, [-1, -2]),
    ],
)
def test_published_cases(method, lb, lt, versions, version, expected):
    lb, lt, expected = (torch.tensor([values], dtype=torch.float64) for values in (lb, lt, expected))
    staleness = token_staleness(torch.tensor([versions]), version)
    torch.testing.assert_close(proximal_logps(lb, lt, staleness, method), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("lb", "lt", "d", "lp", "w", "r"),
    [
        (-1, -1.5, 0, -1, 1, 0.606531),
        (-1, -1.5, 1, -1, 1, 0.606531),
        (-1, -1.5, 2, -1.25, 0.778801, 0.778801),
        (-1, -1.5, 4, -1.375, 0.687289, 0.882497),
        (-1, -1.5, 8, -1.4375, 0.645649, 0.939413),
        (-2, -2.2, 2, -2.1, 0.904837, 0.904837),
        (-2, -1, 4, -1.25, 2.117000, 1.284025),
        (-2, -1, 8, -1.125, 2.398875, 1.133148),
    ],
)
def test_worked_values_of_proximal_weight_and_ratio(lb, lt, d, lp, w, r):
    lb_, lt_ = torch.tensor([[lb]], dtype=torch.float64), torch.tensor([[lt]], dtype=torch.float64)
    got_lp = proximal_logps(lb_, lt_, torch.tensor([[d]]))
    got_w, _ = behavior_weight(got_lp, lb_, torch.ones(1, 1))
    got_r = (lt_ - got_lp).exp()
    assert got_lp.item() == pytest.approx(lp, abs=1e-12)
    assert got_w.item() == pytest.approx(w, abs=1e-6)
    assert got_r.item() == pytest.approx(r, abs=1e-6)
    assert (got_w * got_r).item() == pytest.approx(math.exp(lt - lb), abs=1e-12)


@pytest.mark.parametrize("method", ["loglinear", "linear"])
def test_fresh_and_one_step_old_tokens_sit_on_the_chosen_policy_bit_for_bit(make_batch, method):
    batch = make_batch(max_staleness=1)
    lb, lt = batch.behavior_logps.float(), batch.policy_logps.float()
    assert torch.equal(proximal_logps(lb, lt, batch.staleness, method, fresh="behavior"), lb)
    on_fresh = proximal_logps(lb, lt, batch.staleness, method, fresh="policy")
    assert torch.equal(on_fresh, torch.where(batch.staleness == 0, lt, lb))


@pytest.mark.parametrize("method", ["loglinear", "linear", "behavior", "reuse"])
def test_the_proximal_policy_lies_between_the_two_and_carries_no_gradient(make_batch, method):
    batch = make_batch()
    policy, behavior = batch.fresh_policy(), batch.behavior_logps.clone().requires_grad_()
    lp = proximal_logps(behavior, policy, batch.staleness, method)
    assert not lp.requires_grad
    assert (lp >= torch.minimum(policy, behavior) - 1e-12).all()
    assert (lp <= torch.maximum(policy, behavior) + 1e-12).all()


@given(st.floats(-20, 0), st.floats(-20, 0), st.integers(0, 50))
def test_linear_is_the_log_of_the_mean_probability(lb, lt, d):
    a = (d - 1) / d if d else 0.0
    expected = LOG((1 - a) * math.exp(lb) + a * math.exp(lt))
    got = proximal_logps(torch.tensor([[lb]]).double(), torch.tensor([[lt]]).double(), torch.tensor([[d]]), "linear")
    # float32 of the inputs above is the only rounding that matters
    assert got.item() == pytest.approx(expected, abs=1e-5)


def test_linear_does_not_underflow_where_probabilities_do():
    lb, lt = torch.tensor([[-200.0]]), torch.tensor([[-201.0]])
    expected = -200 + LOG(0.5 + 0.5 * math.exp(-1))
    assert proximal_logps(lb, lt, torch.tensor([[2]]), "linear").item() == pytest.approx(expected, rel=1e-6)


def test_reuse_is_the_current_policy_and_behavior_is_the_sampler(make_batch):
    batch = make_batch()
    assert torch.equal(
        proximal_logps(batch.behavior_logps, batch.policy_logps, batch.staleness, "reuse"), batch.policy_logps
    )
    assert torch.equal(
        proximal_logps(batch.behavior_logps, batch.policy_logps, batch.staleness, "behavior"), batch.behavior_logps
    )


def test_an_unknown_method_is_refused_with_the_options():
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="method='harmonic' is unknown: set one of 'loglinear', 'linear', 'behavior'"):
        proximal_logps(ones, ones, ones, "harmonic")
