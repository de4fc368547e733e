"""The merge of the two kernel calls, with kernels of ten lines in their place: values and gradients are those of
attention with a dense mask, in float64."""

import itertools

import pytest
import torch

from trl_a3po.forward.layout import PackedRow, Segment
from trl_a3po.forward.varlen import Kernels, MergedAttention, VarlenPlan

SCALE = 0.4


def spans(bounds):
    edges = bounds.tolist()
    return [slice(start, end) for start, end in itertools.pairwise(edges)]


def scores(q, k, causal, window):
    """`(H, n, m)` of one span, hidden pairs at -inf; queries are the last n positions of m, as in FlashAttention."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = SCALE * torch.einsum("nhd,mhd->hnm", q, k)
    queries, keys = torch.arange(len(q), device=q.device), torch.arange(len(k), device=q.device)
    distance = queries[:, None] + len(k) - len(q) - keys
    hidden = causal & (distance < 0)
    if window is not None:
        hidden |= distance >= window
    return s.masked_fill(hidden, -torch.inf)


def reference_forward(q, k, v, queries, keys, causal, scaling, window):
    o, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for rows, columns in zip(spans(queries.bounds), spans(keys.bounds), strict=True):
        s = scores(q[rows], k[columns], causal, window)
        lse[:, rows] = s.logsumexp(-1)
        values = v[columns].repeat_interleave(q.shape[1] // k.shape[1], 1)
        o[rows] = torch.einsum("hnm,mhd->nhd", s.softmax(-1), values)
    return o, lse


def reference_backward(grad, q, k, v, o, lse, queries, keys, causal, scaling, window):
    """From the given `o` and `lse`, as FlashAttention's: p = exp(s - lse), dp = grad·v, ds = p·(dp - sum(grad·o))."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    repeats = q.shape[1] // k.shape[1]
    for rows, columns in zip(spans(queries.bounds), spans(keys.bounds), strict=True):
        p = (scores(q[rows], k[columns], causal, window) - lse[:, rows, None]).exp()
        dp = torch.einsum("nhd,mhd->hnm", grad[rows], v[columns].repeat_interleave(repeats, 1))
        ds = SCALE * p * (dp - (grad[rows] * o[rows]).sum(-1).T[..., None])
        dq[rows] = torch.einsum("hnm,mhd->nhd", ds, k[columns].repeat_interleave(repeats, 1))
        heads = (len(k[columns]), k.shape[1], repeats, k.shape[2])
        dk[columns] += torch.einsum("hnm,nhd->mhd", ds, q[rows]).reshape(heads).sum(2)
        dv[columns] += torch.einsum("hnm,nhd->mhd", p, grad[rows]).reshape(heads).sum(2)
    return dq, dk, dv


REFERENCE = Kernels(reference_forward, reference_backward)

ROWS = {
    "packed": PackedRow((Segment(0, 5), Segment(5, 1), Segment(6, 7))),
    "shared": PackedRow((Segment(0, 6), Segment(6, 3, 0), Segment(9, 4, 0))),
    "two prompts, one sequence": PackedRow(
        (Segment(0, 4), Segment(4, 2), Segment(6, 3, 0), Segment(9, 1, 0), Segment(10, 5, 1), Segment(15, 4))
    ),
    "a prompt that nothing continues": PackedRow((Segment(0, 4), Segment(4, 3), Segment(7, 2, 0), Segment(9, 2))),
}


def dense(q, k, v, row, window):
    """Attention with one mask, token by token from what a segment says."""
    sees = torch.zeros(row.tokens, row.tokens, dtype=torch.bool, device=q.device)
    position = torch.cat([row.offset(s) + torch.arange(s.length, device=q.device) for s in row.segments])
    for segment in row.segments:
        sees[segment.tokens, segment.tokens] = True
        if segment.prefix is not None:
            sees[segment.tokens, row.segments[segment.prefix].tokens] = True
    sees &= position[:, None] >= position
    if window is not None:
        sees &= position[:, None] - position < window
    repeats = q.shape[1] // k.shape[1]
    s = SCALE * torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(repeats, 1))
    weights = s.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(repeats, 1))


def inputs(row):
    generator = torch.Generator().manual_seed(2)
    shapes = (row.tokens, 4, 8), (row.tokens, 2, 8), (row.tokens, 2, 8), (row.tokens, 4, 8)
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [tensor.requires_grad_() for tensor in (q, k, v)], grad


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_those_of_a_dense_mask(name):
    row = ROWS[name]
    (q, k, v), grad = inputs(row)
    expected = dense(q, k, v, row, None)
    found = MergedAttention.apply(q, k, v, VarlenPlan.of(row, q.device), SCALE, None, REFERENCE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    expected_gradients = torch.autograd.grad(expected, (q, k, v), grad)
    for ours, theirs in zip(torch.autograd.grad(found, (q, k, v), grad), expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_window_slides_within_sequences():
    row = ROWS["packed"]
    (q, k, v), grad = inputs(row)
    expected = dense(q, k, v, row, 3)
    found = MergedAttention.apply(q, k, v, VarlenPlan.of(row, q.device), SCALE, 3, REFERENCE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    expected_gradients = torch.autograd.grad(expected, (q, k, v), grad)
    for ours, theirs in zip(torch.autograd.grad(found, (q, k, v), grad), expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_partial_log_sum_exps_in_the_backward_are_wrong():
    """What the merge rests on: with the parts' own `o` and `lse`, gradients are those of two separate softmaxes."""
    row = ROWS["shared"]
    (q, k, v), grad = inputs(row)
    own = VarlenPlan(VarlenPlan.of(row, q.device).own)
    alone = MergedAttention.apply(q, k, v, own, SCALE, None, REFERENCE)
    expected = torch.autograd.grad(dense(q, k, v, row, None), q, grad)[0]
    assert (torch.autograd.grad(alone, q, grad)[0] - expected).abs().max() > 1e-2
