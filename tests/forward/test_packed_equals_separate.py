"""Log-probs, entropies and gradients of a packed row, with and without shared prompts, are those of each sequence run
alone without padding, in float64."""

import pytest
import torch

from tests.forward.models import MODELS, micro_batch, packable, separate, tiny_model
from trl_a3po.forward import attention
from trl_a3po.forward.layout import pack, rows_by_prompt
from trl_a3po.forward.packed import packed_logps
from trl_a3po.models.unwrap import base_model

# Norms and rotations of transformers run in float32 in a model of any dtype: differences of 1e-8.
TOLERANCE = 1e-7
MATES = [[0, 1, 4], [2, 6]]
PROMPTS, COMPLETIONS = [7, 7, 9, 5, 7, 1, 9, 4], [5, 9, 3, 6, 1, 4, 12, 0]


def run(model, batch, *, share: bool):
    ids, mask, width = batch
    groups = rows_by_prompt(ids, mask, width) if share else ()
    packed = pack(mask, width, groups)
    assert bool(packed.row.shared) == share
    return packed_logps(model, base_model(model), ids, packed, width)


def loss_of(logps, entropies):
    weights = torch.linspace(-1, 1, logps.numel(), dtype=logps.dtype).view(logps.shape)
    return (weights * logps).sum() + 0.1 * (weights.flip(0) * entropies).sum()


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equals_separate(model, batch, *, share: bool):
    expected = separate(model, *batch)
    loss_of(*expected).backward()
    expected_gradients = gradients(model)
    found = run(packable(model), batch, share=share)
    loss_of(*found).backward()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    found_gradients = gradients(model)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        distance = (found_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-9)
        assert distance < 1e-6, f"{name}: {distance:.2g} of the gradient's norm"
    assert max(gradient.abs().max() for gradient in expected_gradients.values()) > 1e-2


@pytest.fixture
def batch():
    return micro_batch(PROMPTS, COMPLETIONS, same_prompt=MATES)


@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_type(name, share, batch):
    assert_equals_separate(tiny_model(name), batch, share=share)


@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared"])
@pytest.mark.parametrize("name", ["llama", "qwen3-mixed"])
def test_a_lora_adapter(name, share, batch):
    assert_equals_separate(tiny_model(name, lora=True), batch, share=share)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "qwen3-mixed"])
def test_gradient_checkpointing(name, reentrant, batch):
    model = tiny_model(name)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equals_separate(model, batch, share=True)


@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared"])
@pytest.mark.parametrize("block", [1, 8, 10_000])
def test_blocks_of_any_size(block, share, batch, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_TOKENS", block)
    assert_equals_separate(tiny_model("mistral-sliding"), batch, share=share)


@pytest.mark.parametrize(
    ("prompts", "completions"),
    [
        ([3, 3, 3], [1, 1, 1]),  # nothing but the prompt is run
        ([1, 1], [2, 5]),  # a prompt of one token
        ([6], [4]),  # nobody to share with
        ([2, 2, 5, 5], [1, 1, 3, 2]),  # a shared prompt that nothing continues, and one that something does
    ],
)
def test_short_sequences(prompts, completions):
    same = [[i for i, p in enumerate(prompts) if p == length] for length in sorted(set(prompts))]
    batch = micro_batch(prompts, completions, same_prompt=same)
    model = tiny_model()
    expected = separate(model, *batch)
    packable(model)
    ids, mask, width = batch
    found = packed_logps(model, model, ids, pack(mask, width, rows_by_prompt(ids, mask, width)), width)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_a_padded_forward_is_unchanged_by_packed_attention(batch):
    model = tiny_model("qwen3-mixed")
    ids, mask, _ = batch
    before = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(packable(model)(input_ids=ids, attention_mask=mask).logits, before)
