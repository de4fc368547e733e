"""Masked IS, AIPO and M2PO: through the clipped PPO loss, each has the value or gradient of its own equation."""

import math

import pytest
import torch

from trl_a3po.objectives import aipo_anchor, m2po_anchor, masked_is_anchor

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf)[0]


def gradient_through_the_seam(ppo, batch, anchor_of, **options):
    policy = batch.fresh_policy()
    anchor, weight, _ = anchor_of(*batch.but(policy_logps=policy).args(), **options)
    assert not anchor.requires_grad and not weight.requires_grad
    return gradient(ppo(policy, anchor, batch.advantages.unsqueeze(1) * weight, batch.mask), policy)


def kept_by_dropping_one_by_one(log_ratio, mask, threshold):
    """M2PO in ten lines: drop the largest square until the mean of the rest is small enough."""
    kept = {(i, j): float(log_ratio[i, j]) ** 2 for i, j in mask.nonzero().tolist()}
    while kept and math.fsum(kept.values()) / len(kept) > threshold:
        del kept[max(kept, key=lambda position: (kept[position], position))]
    result = torch.zeros_like(mask)
    for position in kept:
        result[position] = True
    return result


@pytest.mark.parametrize("seed", range(5))
def test_aipo_is_the_log_likelihood_weighted_by_the_truncated_behavior_ratio(make_batch, ppo, row_means, seed):
    batch = make_batch(seed)
    policy = batch.fresh_policy()
    rho = (batch.policy_logps - batch.behavior_logps).exp()
    expected = row_means(-torch.minimum(rho, torch.tensor(2.0)) * batch.advantages.unsqueeze(1) * policy, batch.mask)
    actual = gradient_through_the_seam(ppo, batch, aipo_anchor, cap=2.0)
    torch.testing.assert_close(actual, gradient(expected, policy), **EXACT)
    assert (rho[batch.mask] > 2).any()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [1e-6, 0.04, 0.5, 1e6])
def test_m2po_drops_the_tokens_that_moved_most(make_batch, ppo, row_means, seed, threshold):
    batch = make_batch(seed)
    policy = batch.fresh_policy()
    log_ratio = batch.policy_logps - batch.behavior_logps
    kept = kept_by_dropping_one_by_one(log_ratio, batch.mask, threshold)
    expected = row_means(-log_ratio.exp() * kept * batch.advantages.unsqueeze(1) * policy, batch.mask)
    actual = gradient_through_the_seam(ppo, batch, m2po_anchor, threshold=threshold)
    torch.testing.assert_close(actual, gradient(expected, policy), **EXACT)


@pytest.mark.parametrize(
    ("anchor_of", "options", "gradients"),
    [
        (aipo_anchor, {"cap": 1.5}, [-1.5 / 3, -0.6 / 3, -1 / 3]),  # the first ratio is cut
        (m2po_anchor, {"threshold": 0.2}, [0, -0.6 / 3, -1 / 3]),  # squares 0.48, 0.26, 0: means 0.25, then 0.13
        (masked_is_anchor, {"lower": 0.7, "upper": 3.0}, [-2 / 3, 0, -1 / 3]),  # the second is too small
    ],
)
def test_baselines_worked_by_hand(ppo, anchor_of, options, gradients):
    """Ratios of 2, 0.6 and 1 to the behavior policy, an advantage of 1."""
    policy = torch.tensor([[0.5, 0.3, 0.5]], dtype=torch.float64).log().requires_grad_()
    behavior = torch.tensor([[0.25, 0.5, 0.5]], dtype=torch.float64).log()
    ones = torch.ones(1, 3)
    anchor, weight, _ = anchor_of(policy, behavior, ones.int(), ones[:, 0], ones, **options)
    found = gradient(ppo(policy, anchor, weight, ones), policy)
    torch.testing.assert_close(found, torch.tensor([gradients], dtype=torch.float64), rtol=0, atol=1e-12)


def test_m2po_keeps_every_token_of_an_unchanged_policy(make_batch):
    batch = make_batch()
    _, weight, stats = m2po_anchor(*batch.but(policy_logps=batch.behavior_logps).args())
    assert (weight[batch.mask] == 1).all() and stats.metrics()["a3po/w/capped"] == 0


@pytest.mark.parametrize("recomputed", [False, True])
def test_masked_is_is_weighted_clipped_ppo_without_the_tokens_outside_the_band(make_batch, ppo, row_means, recomputed):
    batch = make_batch()
    lp = batch.policy_logps + 0.4 * torch.randn(batch.mask.shape, dtype=torch.float64) if recomputed else None
    policy = batch.fresh_policy()
    anchor = lp if recomputed else batch.policy_logps
    w, r, A = (anchor - batch.behavior_logps).exp(), (policy - anchor).exp(), batch.advantages.unsqueeze(1)
    inside = torch.where((w < 0.5) | (w > 2.0), 0.0, w)
    clipped = torch.where(r > 1.2, 1.2, torch.where(r < 0.8, 0.8, r))
    expected = row_means(-inside * torch.minimum(r * A, clipped * A), batch.mask)
    actual = gradient_through_the_seam(ppo, batch, masked_is_anchor, recomputed_logps=lp, lower=0.5, upper=2.0)
    torch.testing.assert_close(actual, gradient(expected, policy), **EXACT)
    assert (w[batch.mask] > 2).any() and (w[batch.mask] < 0.5).any()


def test_the_bounds_of_masked_is_are_kept():
    lb = torch.zeros(1, 4, dtype=torch.float64)
    lt = torch.tensor([[0.5, 2.0, 0.4999, 2.0001]], dtype=torch.float64).log()
    ones = torch.ones(1, 4)
    _, weight, stats = masked_is_anchor(lt, lb, ones.int(), ones[:, 0], ones, lower=0.5, upper=2.0)
    torch.testing.assert_close(weight, torch.tensor([[0.5, 2.0, 0, 0]], dtype=torch.float64))
    assert stats.metrics()["a3po/w/capped"] == 0.5


@pytest.mark.parametrize(
    ("anchor_of", "options", "message"),
    [
        (masked_is_anchor, {"lower": 1.0}, "lower=1.0"),
        (masked_is_anchor, {"upper": 0.9}, "upper=0.9"),
        (masked_is_anchor, {"lower": math.nan}, "lower=nan"),
        (aipo_anchor, {"cap": 1.0}, "cap=1.0"),
        (aipo_anchor, {"cap": math.nan}, "cap=nan"),
        (m2po_anchor, {"threshold": 0.0}, "threshold=0.0"),
        (m2po_anchor, {"threshold": math.nan}, "threshold=nan"),
    ],
)
def test_a_setting_out_of_range_is_refused(make_batch, anchor_of, options, message):
    with pytest.raises(ValueError, match=rf"{message}.*set"):
        anchor_of(*make_batch().args(), **options)
