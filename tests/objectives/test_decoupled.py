"""The decoupled loss against clipped PPO on the total ratio, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_a3po.objectives import decoupled_loss, proximal_logps

EPSILONS = [(0.2, 0.2), (0.2, 0.28), (0.4, 0.1)]


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf)[0]


def decoupled_gradient(batch, epsilon_low, epsilon_high, method="loglinear", fresh="behavior"):
    policy = batch.fresh_policy()
    lp = proximal_logps(batch.behavior_logps, policy, batch.staleness, method, fresh)
    loss, _ = decoupled_loss(
        policy,
        batch.behavior_logps,
        lp,
        batch.advantages,
        batch.mask,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        weight_mode="none",
    )
    return gradient(loss.sum(), policy)


def band_gradient(batch, epsilon_low, epsilon_high):
    """Clipped PPO on ρ, whose band widens with staleness."""
    policy = batch.fresh_policy()
    rho, D = (policy - batch.behavior_logps).exp(), batch.staleness.clamp(min=1)
    A = batch.advantages.unsqueeze(1)
    clipped = rho.clamp((1 - epsilon_low) ** D, (1 + epsilon_high) ** D)
    return gradient((-torch.min(rho * A, clipped * A) * batch.mask).sum(), policy)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("epsilon_low", "epsilon_high"), EPSILONS)
def test_uncapped_gradient_is_that_of_ppo_on_rho_with_the_widened_band(make_batch, seed, epsilon_low, epsilon_high):
    batch = make_batch(seed, rows=256)
    got = decoupled_gradient(batch, epsilon_low, epsilon_high)
    torch.testing.assert_close(got, band_gradient(batch, epsilon_low, epsilon_high), rtol=1e-12, atol=1e-12)
    for d in range(9):
        for sign in (-1, 1):
            tokens = got[batch.mask & (batch.staleness == d) & (batch.advantages.sign() == sign).unsqueeze(1)]
            assert (tokens == 0).any() and (tokens != 0).any(), "the batch must clip some tokens and not others"


@given(
    log_rho=st.floats(-8, 8),
    d=st.integers(0, 8),
    advantage=st.floats(0.1, 3) | st.floats(-3, -0.1),
    epsilons=st.sampled_from(EPSILONS),
)
def test_uncapped_gradient_of_one_token(log_rho, d, advantage, epsilons):
    lb = torch.tensor([[-9.0]], dtype=torch.float64)
    policy = (lb + log_rho).requires_grad_()
    A, d = torch.tensor([advantage], dtype=torch.float64), torch.tensor([[d]])
    lp = proximal_logps(lb, policy, d)
    loss, _ = decoupled_loss(
        policy, lb, lp, A, torch.ones(1, 1), epsilon_low=epsilons[0], epsilon_high=epsilons[1], weight_mode="none"
    )
    rho, D = (policy - lb).exp(), d.clamp(min=1)
    expected = -torch.min(rho * A, rho.clamp((1 - epsilons[0]) ** D, (1 + epsilons[1]) ** D) * A)
    torch.testing.assert_close(gradient(loss.sum(), policy), gradient(expected.sum(), policy), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["loglinear", "linear", "behavior", "reuse"])
def test_far_from_the_clip_the_gradient_does_not_depend_on_the_proximal_policy(make_batch, method):
    batch = make_batch()
    rho = (batch.policy_logps - batch.behavior_logps).exp()
    expected = torch.where(batch.mask, -rho * batch.advantages.unsqueeze(1), 0)
    got = decoupled_gradient(batch, epsilon_low=1.0, epsilon_high=1e9, method=method)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_up_to_one_step_old_it_is_ppo_on_behavior_log_probs(make_batch, ppo, row_means):
    batch = make_batch(max_staleness=1)
    policy = batch.fresh_policy()
    lp = proximal_logps(batch.behavior_logps, policy, batch.staleness)
    per_token, _ = decoupled_loss(policy, batch.behavior_logps, lp, batch.advantages, batch.mask)
    loss = row_means(per_token, batch.mask)
    expected = ppo(policy, batch.behavior_logps, batch.advantages.unsqueeze(1), batch.mask)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(loss, policy), gradient(expected, policy), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("fresh", "clips"), [("policy", False), ("behavior", True)])
def test_fresh_tokens_are_never_clipped_when_their_anchor_is_the_policy(make_batch, fresh, clips):
    batch = make_batch(max_staleness=0)
    got = decoupled_gradient(batch, 0.2, 0.2, fresh=fresh)
    assert (got[batch.mask] == 0).any() == clips


def test_the_loss_takes_the_proximal_log_probs_it_is_given(make_batch):
    batch = make_batch(spread=0.05)
    recomputed = batch.behavior_logps - 0.1
    loss, _ = decoupled_loss(
        batch.policy_logps,
        batch.behavior_logps,
        recomputed,
        batch.advantages,
        batch.mask,
        epsilon_high=1e9,
        epsilon_low=1,
    )
    w, r = (recomputed - batch.behavior_logps).exp(), (batch.policy_logps - recomputed).exp()
    torch.testing.assert_close(loss, torch.where(batch.mask, -w * r * batch.advantages.unsqueeze(1), 0))


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_the_cap_scales_the_loss_of_capped_tokens_and_of_no_other(make_batch, mode):
    batch = make_batch(spread=0.2)
    lp = proximal_logps(batch.behavior_logps, batch.policy_logps, batch.staleness)
    args = (batch.policy_logps, batch.behavior_logps, lp, batch.advantages, batch.mask)
    uncapped, _ = decoupled_loss(*args, weight_mode="none")
    capped, _ = decoupled_loss(*args, weight_cap=2.0, weight_mode=mode)
    w = (lp - batch.behavior_logps).exp()
    factor = torch.where(w > 2, 2 / w if mode == "truncate" else 0, 1)
    assert (w[batch.mask] > 2).any()
    torch.testing.assert_close(capped, uncapped * factor, rtol=1e-12, atol=1e-12)


def test_sequence_level_uses_geometric_means_of_w_and_r_whose_product_is_that_of_rho(make_batch):
    batch = make_batch(spread=0.2)
    policy = batch.fresh_policy()
    lp = proximal_logps(batch.behavior_logps, policy, batch.staleness)
    loss, _ = decoupled_loss(
        policy,
        batch.behavior_logps,
        lp,
        batch.advantages,
        batch.mask,
        epsilon_low=1.0,
        epsilon_high=1e9,
        weight_mode="none",
        weight_level="sequence",
    )
    log_rho = ((policy - batch.behavior_logps) * batch.mask).sum(-1) / batch.mask.sum(-1)
    expected = -(log_rho.exp() * batch.advantages).unsqueeze(1) * batch.mask
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(loss.sum(), policy), gradient(expected.sum(), policy), rtol=1e-12, atol=1e-12)


def test_the_gradient_reaches_the_current_policy_only(make_batch):
    batch = make_batch()
    policy, behavior = batch.fresh_policy(), batch.behavior_logps.clone().requires_grad_()
    proximal = (batch.behavior_logps + 0.1).requires_grad_()
    loss, _ = decoupled_loss(policy, behavior, proximal, batch.advantages, batch.mask)
    loss.sum().backward()
    assert policy.grad is not None and behavior.grad is None and proximal.grad is None


def test_advantages_per_token_weigh_each_token(make_batch):
    batch = make_batch()
    arguments = batch.fresh_policy(), batch.behavior_logps, batch.behavior_logps + 0.1
    rows, _ = decoupled_loss(*arguments, batch.advantages, batch.mask)
    tokens, _ = decoupled_loss(*arguments, batch.advantages[:, None].expand(batch.mask.shape), batch.mask)
    torch.testing.assert_close(tokens, rows)


def test_advantages_of_another_shape_are_refused():
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 2\).*one advantage per row, \(B,\)"):
        decoupled_loss(zeros, zeros, zeros, zeros[:, :2], torch.ones(2, 3))
