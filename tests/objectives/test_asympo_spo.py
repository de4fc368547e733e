"""ASymPO and SPO against independent float64 formulas."""

import math

import pytest
import torch

from trl_a3po.objectives import asympo_loss, spo_loss


def scale(policy_logps, mask):
    return -(policy_logps * mask).sum(-1) / mask.sum(-1)


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf)[0]


def test_asympo_gradient_is_that_of_the_mean_of_advantage_times_log_scale(make_batch):
    batch = make_batch()
    policy = (-batch.policy_logps.abs() - 0.1).requires_grad_()
    loss, _ = asympo_loss(policy, batch.advantages, batch.mask)
    expected = (batch.advantages * scale(policy, batch.mask).log()).mean()
    torch.testing.assert_close(gradient(loss, policy), gradient(expected, policy), rtol=1e-12, atol=1e-12)


def test_asympo_without_its_stop_gradient_would_learn_nothing(make_batch):
    batch = make_batch()
    policy = (-batch.policy_logps.abs() - 0.1).requires_grad_()
    S = scale(policy, batch.mask)
    assert gradient((batch.advantages * S / S).mean(), policy).abs().max() < 1e-15
    loss, _ = asympo_loss(policy, batch.advantages, batch.mask)
    assert gradient(loss, policy).abs().max() > 1e-3


def test_asympo_value_is_the_mean_advantage(make_batch):
    batch = make_batch()
    loss, _ = asympo_loss(-batch.policy_logps.abs() - 0.1, batch.advantages, batch.mask)
    torch.testing.assert_close(loss, batch.advantages.mean())


def test_the_floor_bounds_what_a_certain_row_is_multiplied_by():
    policy = torch.tensor([[-1e-5, -3e-5], [-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    A = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss, stats = asympo_loss(policy, A, torch.ones(2, 2), min_scale=1e-3)
    torch.testing.assert_close(
        gradient(loss, policy), torch.tensor([[-1e3, -1e3], [1 / 1.5, 1 / 1.5]], dtype=torch.float64) / 4
    )
    assert loss.item() == pytest.approx((2e-5 / 1e-3 - 1) / 2)
    assert stats.metrics()["a3po/floor"] == 0.5


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_spo_is_the_plain_loss_with_negative_advantages_scaled(make_batch, alpha):
    batch = make_batch()
    batch = batch.but(advantages=torch.cat([torch.zeros(1, dtype=torch.float64), batch.advantages[1:]]))
    policy = batch.fresh_policy()
    loss, _ = spo_loss(policy, batch.advantages, batch.mask, negative_scale=alpha)
    A = torch.tensor([a if a >= 0 else alpha * a for a in batch.advantages.tolist()], dtype=torch.float64)
    expected = (A * scale(policy, batch.mask)).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(loss, policy), gradient(expected, policy), rtol=1e-12, atol=1e-12)


def test_spo_leaves_an_advantage_of_zero_unscaled():
    _, stats = spo_loss(-torch.ones(1, 2), torch.zeros(1), torch.ones(1, 2), negative_scale=0.2)
    assert stats.metrics()["a3po/coefficient/mean"] == 1


@pytest.mark.parametrize("loss_of", [asympo_loss, spo_loss])
def test_a_row_without_tokens_adds_nothing_and_counts_in_the_mean(loss_of):
    policy = torch.tensor([[-1.0, -2.0]])
    alone, _ = loss_of(policy, torch.ones(1), torch.ones(1, 2))
    with_empty, stats = loss_of(
        torch.cat([policy, policy]), torch.tensor([1.0, math.nan]), torch.tensor([[1, 1], [0, 0]])
    )
    assert with_empty.item() == pytest.approx(alone.item() / 2)
    assert stats.metrics()["a3po/scale/mean"] == 1.5


@pytest.mark.parametrize("min_scale", [0.0, -1.0, math.nan])
def test_a_floor_that_is_not_positive_is_refused(min_scale):
    with pytest.raises(ValueError, match=r"min_scale=.*set a positive floor"):
        asympo_loss(torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1), min_scale=min_scale)


@pytest.mark.parametrize("negative_scale", [-0.1, 1.1, math.nan])
def test_a_negative_scale_outside_zero_to_one_is_refused(negative_scale):
    with pytest.raises(ValueError, match=r"negative_scale=.*set a number from 0 to 1"):
        spo_loss(torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1), negative_scale=negative_scale)


@pytest.mark.parametrize(
    ("alpha", "value", "gradients"), [(0.2, 0.8, [-0.25, 0.05]), (1, 0, [-0.25, 0.25]), (0, 1, [-0.25, 0])]
)
def test_spo_worked_by_hand(alpha, value, gradients):
    """Scales of 2 and 2, advantages of 1 and -1: the mean of 2 and of -2 alpha; gradients of -A C / (2 * 2)."""
    policy = torch.tensor([[-1.0, -3.0], [-2.0, -2.0]], dtype=torch.float64, requires_grad=True)
    loss, _ = spo_loss(policy, torch.tensor([1.0, -1.0]), torch.ones(2, 2), negative_scale=alpha)
    assert loss.item() == pytest.approx(value, abs=1e-12)
    expected = torch.tensor([[g, g] for g in gradients], dtype=torch.float64)
    torch.testing.assert_close(gradient(loss, policy), expected, rtol=0, atol=1e-12)


def test_asympo_worked_by_hand():
    """Scales of 2 and 1, advantages of 1 and -1: a value of 0, and gradients of -A / (S * 2 * 2)."""
    policy = torch.tensor([[-1.0, -3.0], [-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    loss, _ = asympo_loss(policy, torch.tensor([1.0, -1.0]), torch.ones(2, 2))
    assert loss.item() == 0
    expected = torch.tensor([[-0.125, -0.125], [0.25, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(gradient(loss, policy), expected, rtol=0, atol=1e-12)
