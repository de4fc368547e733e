"""Whatever stands outside the mask, and whatever precision comes in: same values, gradients and statistics."""

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from trl_a3po.objectives import (
    OBJECTIVES,
    asympo_loss,
    behavior_weight,
    decoupled_anchor,
    decoupled_loss,
    masked_is_anchor,
    spo_loss,
)
from trl_a3po.objectives.table import ObjectiveSettings

GARBAGE = [math.nan, math.inf, -math.inf, 1e30, -1e30]


def decoupled(policy, lb, d, A, mask, **options):
    return decoupled_loss(policy, lb, lb + 0.5 * (policy.detach() - lb), A, mask, **options)


LOSSES = {
    "decoupled": decoupled,
    "decoupled-sequence": lambda *args: decoupled(*args, weight_level="sequence"),
    "asympo": lambda policy, lb, d, A, mask: asympo_loss(policy, A, mask),
    "spo": lambda policy, lb, d, A, mask: spo_loss(policy, A, mask),
}
SETTINGS = SimpleNamespace(**asdict(ObjectiveSettings()), importance_sampling_level="token")


def anchor_of(objective):
    """The anchor of an objective with its default settings."""
    rest = {"recomputed_logps": None, "epsilon_low": 0.2, "epsilon_high": 0.2}
    return lambda *batch: objective.anchor_and_weight(SETTINGS, *batch, **rest)


ANCHORS = {name: anchor_of(objective) for name, objective in OBJECTIVES.items()} | {
    "decoupled-linear": lambda *args: decoupled_anchor(*args, proximal_method="linear"),
    "decoupled-sequence": lambda *args: decoupled_anchor(*args, weight_level="sequence"),
    "decoupled-recompute": lambda *args: decoupled_anchor(
        *args, proximal_method="recompute", recomputed_logps=args[0] + 0.1
    ),
    "masked_is-recompute": lambda *args: masked_is_anchor(*args, recomputed_logps=args[0] + 0.1),
}


@pytest.fixture
def batch(make_batch):
    batch = make_batch(seed=1)
    mask = batch.mask.clone()
    mask[2] = False  # a row without tokens
    mask[3, 0] = False  # a hole, as tool output leaves
    return batch.but(policy_logps=-batch.policy_logps.abs() - 0.1, mask=mask)


def spoiled(batch, value, staleness=-7):
    """The same batch with `value` at every masked position and as the advantage of the row without tokens."""
    advantages = torch.where(batch.mask.any(-1), batch.advantages, value)
    return batch.but(
        policy_logps=torch.where(batch.mask, batch.policy_logps, value),
        behavior_logps=torch.where(batch.mask, batch.behavior_logps, value),
        staleness=torch.where(batch.mask, batch.staleness, staleness),
        advantages=advantages,
    )


def loss_gradient_metrics(loss_of, batch):
    policy = batch.fresh_policy()
    loss, stats = loss_of(*batch.but(policy_logps=policy).args())
    loss.sum().backward()
    return loss.detach(), policy.grad, stats.metrics()


@pytest.mark.parametrize("value", GARBAGE)
@pytest.mark.parametrize("name", LOSSES)
def test_masked_positions_change_neither_loss_gradient_nor_statistics(batch, name, value):
    loss, grad, metrics = loss_gradient_metrics(LOSSES[name], batch)
    got_loss, got_grad, got_metrics = loss_gradient_metrics(LOSSES[name], spoiled(batch, value))
    assert torch.equal(got_loss, loss)
    assert torch.equal(got_grad, grad)
    assert got_metrics == metrics
    assert got_grad.isfinite().all() and (got_grad[~batch.mask] == 0).all()


@pytest.mark.parametrize("value", GARBAGE)
@pytest.mark.parametrize("name", ANCHORS)
def test_masked_positions_change_no_anchor_and_leave_it_finite(batch, name, value):
    anchor, weight, stats = ANCHORS[name](*batch.args())
    got_anchor, got_weight, got_stats = ANCHORS[name](*spoiled(batch, value).args())
    assert torch.equal(got_anchor[batch.mask], anchor[batch.mask])
    assert torch.equal(got_weight[batch.mask], weight[batch.mask])
    assert got_stats.metrics() == stats.metrics()
    assert got_anchor.isfinite().all() and got_weight.isfinite().all()


def with_tool_tokens(batch, at=(0, 2, 2), value=math.nan):
    """The same tokens with masked ones between them, before the columns `at`, and the columns of the old ones."""
    length = batch.mask.shape[1]
    columns = sorted([*range(length), *(column - 0.5 for column in at)])
    old = torch.tensor([place for place, column in enumerate(columns) if column == int(column)])

    def widened(tensor, fill):
        wide = torch.full((len(tensor), len(columns)), fill, dtype=tensor.dtype)
        wide[:, old] = tensor
        return wide

    return old, batch.but(
        policy_logps=widened(batch.policy_logps, value),
        behavior_logps=widened(batch.behavior_logps, value),
        staleness=widened(batch.staleness, 0),
        mask=widened(batch.mask, False),
    )


@pytest.mark.parametrize("name", LOSSES)
def test_adding_masked_tokens_changes_nothing_but_positions(batch, name):
    old, wider = with_tool_tokens(batch)
    loss, grad, metrics = loss_gradient_metrics(LOSSES[name], batch)
    got_loss, got_grad, got_metrics = loss_gradient_metrics(LOSSES[name], wider)
    torch.testing.assert_close(got_loss.sum(), loss.sum())
    torch.testing.assert_close(got_grad[:, old], grad)
    assert got_grad.count_nonzero() == grad.count_nonzero() > 0
    assert got_metrics == pytest.approx(metrics, nan_ok=True)


@pytest.mark.parametrize("name", ANCHORS)
def test_adding_masked_tokens_moves_anchors_and_weights_with_their_tokens(batch, name):
    old, wider = with_tool_tokens(batch)
    anchor, weight, stats = ANCHORS[name](*batch.args())
    got_anchor, got_weight, got_stats = ANCHORS[name](*wider.args())
    torch.testing.assert_close(got_anchor[:, old][batch.mask], anchor[batch.mask])
    torch.testing.assert_close(got_weight.expand_as(wider.mask)[:, old], weight.expand_as(batch.mask))
    assert got_stats.metrics() == pytest.approx(stats.metrics(), nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_the_mask_may_have_any_dtype(batch, name, dtype):
    expected = loss_gradient_metrics(LOSSES[name], batch)
    got = loss_gradient_metrics(LOSSES[name], batch.but(mask=batch.mask.to(dtype)))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]) and got[2] == expected[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_input_is_computed_in_fp32(batch, name, dtype):
    half = batch.but(
        **{key: getattr(batch, key).to(dtype) for key in ("policy_logps", "behavior_logps", "advantages")}
    )
    single = half.but(**{key: getattr(half, key).float() for key in ("policy_logps", "behavior_logps", "advantages")})
    half_loss, half_grad, _ = loss_gradient_metrics(LOSSES_IN_FP32[name], half)
    single_loss, single_grad, _ = loss_gradient_metrics(LOSSES_IN_FP32[name], single)
    assert half_loss.dtype == torch.float32 and torch.equal(half_loss, single_loss)
    assert torch.equal(half_grad, single_grad.to(dtype))


# The proximal log-probs that a caller computes in half precision are the caller's rounding, not ours.
LOSSES_IN_FP32 = LOSSES | {
    "decoupled": lambda policy, lb, d, A, mask: decoupled_loss(policy, lb, lb.float() - 0.1, A, mask),
    "decoupled-sequence": lambda policy, lb, d, A, mask: decoupled_loss(
        policy, lb, lb.float() - 0.1, A, mask, weight_level="sequence"
    ),
}


@pytest.mark.parametrize("name", ANCHORS)
def test_anchors_are_fp32_for_half_precision_and_float64_for_float64(batch, name):
    half = batch.but(policy_logps=batch.policy_logps.bfloat16(), behavior_logps=batch.behavior_logps.bfloat16())
    assert {tensor.dtype for tensor in ANCHORS[name](*half.args())[:2]} == {torch.float32}
    assert {tensor.dtype for tensor in ANCHORS[name](*batch.args())[:2]} == {torch.float64}


@pytest.mark.parametrize("name", ANCHORS)
def test_a_batch_without_tokens_is_finite_and_has_no_metrics(batch, name):
    anchor, weight, stats = ANCHORS[name](*batch.but(mask=torch.zeros_like(batch.mask)).args())
    assert anchor.isfinite().all() and weight.isfinite().all()
    assert stats.metrics() == {}


@pytest.mark.parametrize("value", GARBAGE)
def test_behavior_weight_is_finite_whatever_is_masked(batch, value):
    bad = spoiled(batch, value)
    for level in ("token", "sequence"):
        weight, _ = behavior_weight(bad.policy_logps, bad.behavior_logps, bad.mask, level=level)
        assert weight.isfinite().all()
