"""Packed and shared-prompt forwards on a GPU: the kernels against dense attention, and a model in bfloat16 within the
spread of two padded runs of it."""

import pytest
import torch

from tests.forward.models import micro_batch, tiny_model
from tests.forward.test_varlen import REFERENCE, ROWS
from trl_a3po.forward.attention import install_packed_attention
from trl_a3po.forward.layout import PackedRow, Segment, pack, rows_by_prompt
from trl_a3po.forward.packed import packed_logps
from trl_a3po.forward.varlen import FLASH, MergedAttention, VarlenPlan

pytestmark = pytest.mark.gpu

LONG = PackedRow(
    (
        Segment(0, 700),
        Segment(700, 300),
        *(Segment(1000 + 150 * i, 150, 0) for i in range(4)),
        Segment(1600, 90, 1),
        Segment(1690, 513),
    )
)
SCALE = 64**-0.5


def inputs(row, dtype):
    generator = torch.Generator().manual_seed(2)
    shapes = (row.tokens, 8, 64), (row.tokens, 2, 64), (row.tokens, 2, 64), (row.tokens, 8, 64)
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]


def attended(kernels, tensors, row, window):
    q, k, v, grad = tensors
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out = MergedAttention.apply(q, k, v, VarlenPlan.of(row, q.device), SCALE, window, kernels)
    return out, *torch.autograd.grad(out, (q, k, v), grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", [*ROWS.values(), LONG], ids=[*ROWS, "long"])
def test_the_kernels_are_the_reference(row, dtype, monkeypatch):
    monkeypatch.setattr("tests.forward.test_varlen.SCALE", SCALE)
    tensors = inputs(row, dtype)
    found = attended(FLASH, tensors, row, None)
    expected = attended(REFERENCE, [tensor.float() for tensor in tensors], row, None)
    for name, ours, theirs in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        distance = (ours.float() - theirs).norm() / theirs.norm()
        assert distance < 1e-2, f"{name}: {distance:.2g} of its norm"


@pytest.mark.parametrize("window", [1, 5, 64])
def test_a_window_slides_as_the_reference_does(window, monkeypatch):
    monkeypatch.setattr("tests.forward.test_varlen.SCALE", SCALE)
    row = PackedRow((Segment(0, 300), Segment(300, 20), Segment(320, 150)))
    tensors = inputs(row, torch.bfloat16)
    found = attended(FLASH, tensors, row, window)
    expected = attended(REFERENCE, [tensor.float() for tensor in tensors], row, window)
    for name, ours, theirs in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        if window == 1 and name in ("dq", "dk"):
            # Seeing itself alone, a token's attention does not depend on its query and key: both round to nothing.
            assert max(ours.float().norm(), theirs.norm()) < 1e-6 * tensors[-1].float().norm()
        else:
            assert (ours.float() - theirs).norm() / theirs.norm() < 1e-2


def padded_logps(model, ids, mask, width, extra=0):
    """TRL's padded forward, with `extra` columns more of padding."""
    pad = torch.nn.functional.pad
    ids, mask = pad(ids, (extra, 0)), pad(mask, (extra, 0))
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-width] = -100
    return model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -width:]


def gpu_model(name, dtype):
    overrides = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 1024}
    model = tiny_model(name, dtype=dtype, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.4)
    install_packed_attention(model.to("cuda"))
    return model


@pytest.fixture
def batch():
    same = [[0, 1, 2, 3], [5, 6]]
    ids, mask, width = micro_batch([60, 60, 60, 60, 33, 81, 81], [50, 200, 7, 90, 120, 1, 33], same_prompt=same)
    return ids.cuda(), mask.cuda(), width


@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "mistral-sliding", "qwen3-mixed"])
def test_bfloat16_is_within_the_spread_of_two_padded_runs(name, share, batch):
    ids, mask, width = batch
    model = gpu_model(name, torch.bfloat16)
    groups = rows_by_prompt(ids.cpu(), mask.cpu(), width) if share else ()
    packed = pack(mask.cpu(), width, groups)
    scored = mask[:, -width:].bool()
    weights = torch.randn(scored.shape, generator=torch.Generator().manual_seed(3)).cuda() * scored

    def run(logps):
        model.zero_grad()
        (weights * logps).sum().backward()
        gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        return logps.detach().float(), gradient

    exact = gpu_model(name, torch.float32)
    exact.load_state_dict(model.state_dict())
    truth = padded_logps(exact, ids, mask, width)
    (weights * truth).sum().backward()
    true_gradient = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    runs = [run(padded_logps(model, ids, mask, width, extra)) for extra in (0, 13)]
    found, gradient = run(packed_logps(model, model, ids, packed, width)[0])
    errors = [(logps - truth)[scored].abs().mean().item() for logps, _ in runs]
    error = (found - truth)[scored].abs().mean().item()
    assert error < 1.5 * max(errors), (error, errors)
    gradient_errors = [(g - true_gradient).norm().item() for _, g in runs]
    assert (gradient - true_gradient).norm().item() < 1.5 * max(gradient_errors), gradient_errors


@pytest.mark.parametrize(
    ("name", "dtype", "autocast", "share", "kernel"),
    [
        ("llama", torch.bfloat16, False, True, "FlashAttention"),
        ("qwen3", torch.float32, True, True, "FlashAttention"),
        ("llama", torch.float32, False, True, "SDPA (dtype torch.float32)"),
        ("mistral-sliding", torch.bfloat16, False, False, "FlashAttention"),
    ],
)
def test_the_kernel_is_chosen_by_device_and_dtype(name, dtype, autocast, share, kernel, batch):
    ids, mask, width = batch
    model = gpu_model(name, dtype)
    packed = pack(mask.cpu(), width, rows_by_prompt(ids.cpu(), mask.cpu(), width) if share else ())
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = packed_logps(model, model, ids, packed, width)[0]
        expected = padded_logps(model, ids, mask, width)
    assert packed.row.cache["kernel"] == kernel
    assert (found - expected).abs().mean() < (1e-4 if dtype == torch.float32 and not autocast else 0.05)
    found.sum().backward()


def test_gradient_checkpointing_gives_the_same_gradient(batch):
    ids, mask, width = batch
    packed = pack(mask.cpu(), width, rows_by_prompt(ids.cpu(), mask.cpu(), width))
    gradients = []
    for checkpointing in (False, True):
        model = gpu_model("qwen3", torch.bfloat16).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        packed_logps(model, model, ids, packed, width)[0].sum().backward()
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() < 1e-2 * gradients[0].norm()
