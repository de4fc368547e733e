"""The seam: clipped PPO given `(anchor, A·weight)` has the gradient of each closed form."""

import inspect
import math

import pytest
import torch

from trl_a3po import objectives
from trl_a3po.objectives import (
    asympo_anchor,
    asympo_loss,
    behavior_weight,
    decoupled_anchor,
    decoupled_loss,
    proximal_logps,
    spo_anchor,
    spo_loss,
)

ANCHORS = [decoupled_anchor, asympo_anchor, spo_anchor]
METHODS = ["loglinear", "linear", "behavior", "reuse", "recompute"]


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf)[0]


def anchored_loss(ppo, batch, policy, anchor, weight, **band):
    return ppo(policy, anchor, batch.advantages.unsqueeze(1) * weight, batch.mask, **band)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "none"])
@pytest.mark.parametrize("method", METHODS)
def test_decoupled_anchor_gives_the_value_and_gradient_of_decoupled_loss(
    make_batch, ppo, row_means, method, mode, level
):
    batch = make_batch()
    policy = batch.fresh_policy()
    recomputed = batch.policy_logps + 0.1 if method == "recompute" else None
    lp = recomputed
    if lp is None:
        lp = proximal_logps(batch.behavior_logps, policy, batch.staleness, method)
    cap = {"weight_cap": 2.0, "weight_mode": mode, "weight_level": level}
    per_token, _ = decoupled_loss(
        policy, batch.behavior_logps, lp, batch.advantages, batch.mask, epsilon_low=0.2, epsilon_high=0.3, **cap
    )
    expected = row_means(per_token, batch.mask)

    options = {"proximal_method": method, "recomputed_logps": recomputed, "epsilon_low": 0.2, "epsilon_high": 0.3}
    anchor, weight, _ = decoupled_anchor(*batch.but(policy_logps=policy).args(), **options, **cap)
    loss = anchored_loss(ppo, batch, policy, anchor, weight, low=0.8, high=1.3, level=level)

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(loss, policy), gradient(expected, policy), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("anchor_of", "loss_of", "options"),
    [
        (asympo_anchor, asympo_loss, {}),
        (asympo_anchor, asympo_loss, {"min_scale": 1.0}),
        (spo_anchor, spo_loss, {}),
        (spo_anchor, spo_loss, {"negative_scale": 0.0}),
        (spo_anchor, spo_loss, {"negative_scale": 1.0}),
    ],
)
def test_scaled_anchors_give_the_gradient_of_their_closed_form(make_batch, ppo, anchor_of, loss_of, options):
    batch = make_batch()
    batch = batch.but(policy_logps=-batch.policy_logps.abs())
    policy = batch.fresh_policy()
    anchor, weight, stats = anchor_of(*batch.but(policy_logps=policy).args(), **options)
    loss = anchored_loss(ppo, batch, policy, anchor, weight)
    expected, closed_stats = loss_of(policy, batch.advantages, batch.mask, **options)
    torch.testing.assert_close(gradient(loss, policy), gradient(expected, policy), rtol=1e-12, atol=1e-12)
    whole = closed_stats.metrics()
    assert {key: stats.metrics()[key] for key in whole} == pytest.approx(whole)


@pytest.mark.parametrize("anchor_of", ANCHORS)
def test_anchor_and_weight_are_detached_and_have_the_masks_shape(make_batch, anchor_of):
    batch = make_batch()
    anchor, weight, _ = anchor_of(*batch.but(policy_logps=batch.fresh_policy()).args())
    assert not anchor.requires_grad and not weight.requires_grad
    assert anchor.shape == weight.shape == batch.mask.shape


@pytest.mark.parametrize("anchor_of", ANCHORS)
def test_outside_the_mask_the_anchor_is_the_policy_so_that_the_ratio_is_one(make_batch, anchor_of):
    batch = make_batch()
    anchor, weight, _ = anchor_of(*batch.args())
    outside = ~batch.mask
    assert torch.equal(anchor[outside], batch.policy_logps[outside])
    assert weight.isfinite().all()


def test_decoupled_anchor_is_proximal_logps_and_behavior_weight(make_batch):
    batch = make_batch()
    anchor, weight, _ = decoupled_anchor(*batch.args(), weight_cap=2.0)
    lp = proximal_logps(batch.behavior_logps, batch.policy_logps, batch.staleness)
    w, _ = behavior_weight(lp, batch.behavior_logps, batch.mask, cap=2.0)
    assert torch.equal(anchor[batch.mask], lp[batch.mask])
    assert torch.equal(weight[batch.mask], w[batch.mask])


def test_reuse_is_recompute_while_the_policy_has_not_moved(make_batch):
    batch = make_batch()
    reused = decoupled_anchor(*batch.args(), proximal_method="reuse")
    recomputed = decoupled_anchor(
        *batch.args(), proximal_method="recompute", recomputed_logps=batch.policy_logps.clone()
    )
    assert torch.equal(reused[0], recomputed[0]) and torch.equal(reused[1], recomputed[1])
    metrics = reused[2].metrics()
    assert metrics["a3po/r/min"] == metrics["a3po/r/max"] == 1


@pytest.mark.parametrize(("method", "given"), [("recompute", False), ("loglinear", True)])
def test_recomputed_log_probs_come_with_recompute_and_only_then(make_batch, method, given):
    batch = make_batch()
    with pytest.raises(ValueError, match=f"recomputed_logps is .* with proximal_method='{method}'"):
        decoupled_anchor(*batch.args(), proximal_method=method, recomputed_logps=batch.policy_logps if given else None)


def test_an_unknown_proximal_method_is_refused_with_the_options(make_batch):
    with pytest.raises(ValueError, match=r"proximal_method='old' is unknown.*'reuse', 'recompute'"):
        decoupled_anchor(*make_batch().args(), proximal_method="old")


@pytest.mark.parametrize("anchor_of", ANCHORS)
def test_a_negative_staleness_is_refused(make_batch, anchor_of):
    batch = make_batch()
    negative = batch.staleness.clone()
    negative[:, 0] = -3
    with pytest.raises(ValueError, match="staleness holds -3 inside the mask"):
        anchor_of(*batch.but(staleness=negative).args())


@pytest.mark.parametrize("anchor_of", ANCHORS)
def test_every_objective_starts_with_the_same_five_arguments(anchor_of):
    names = list(inspect.signature(anchor_of).parameters)[:5]
    assert names == ["policy_logps", "behavior_logps", "staleness", "advantages", "mask"]


def test_asympo_and_spo_do_not_read_the_behavior_log_probs(make_batch):
    batch = make_batch()
    unknown = batch.but(behavior_logps=torch.full_like(batch.behavior_logps, math.nan))
    for anchor_of in (asympo_anchor, spo_anchor):
        for got, expected in zip(anchor_of(*unknown.args())[:2], anchor_of(*batch.args())[:2], strict=True):
            assert torch.equal(got, expected)


def test_everything_promised_is_exported():
    promised = (
        "token_staleness interpolation_weight proximal_logps behavior_weight decoupled_loss asympo_loss spo_loss"
    )
    assert set(promised.split()) <= set(objectives.__all__)
