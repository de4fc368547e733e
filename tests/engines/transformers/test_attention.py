"""Attention of one token per slot, against transformers' own."""

from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_a3po.engines.transformers.attention import SlotSequences, attending_to, slot_attention

SCALING = 0.3


def slots(rows: int = 5, heads: int = 6, kv_heads: int = 2, capacity: int = 40, width: int = 64, **where):
    """Queries, keys and values as a cache gives them, and the positions of the new tokens."""
    torch.manual_seed(0)
    query = torch.randn(rows, heads, 1, width, **where)
    keys, values = (torch.randn(rows, capacity, kv_heads, width, **where).transpose(1, 2) for _ in range(2))
    return query, keys, values, torch.tensor([0, 39, 7, 31, 32][:rows], device=query.device)


def hidden(positions: torch.Tensor, capacity: int, dtype: torch.dtype) -> torch.Tensor:
    places = torch.arange(capacity, device=positions.device)
    mask = torch.zeros(len(positions), 1, 1, capacity, dtype=dtype, device=positions.device)
    return mask.masked_fill_((places > positions[:, None])[:, None, None], -torch.inf)


def reference(query, keys, values, positions) -> torch.Tensor:
    """In float32, one slot at a time."""
    outputs = []
    for row, position in enumerate(positions.tolist()):
        repeats = query.shape[1] // keys.shape[1]
        key, value = (
            tensor[row, :, : position + 1].float().repeat_interleave(repeats, 0) for tensor in (keys, values)
        )
        weights = (query[row].float() @ key.transpose(1, 2) * SCALING).softmax(-1)
        outputs.append((weights @ value).transpose(0, 1))
    return torch.stack(outputs)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_grouped_queries_with_a_mask_agree_with_a_loop_over_slots(kv_heads):
    query, keys, values, positions = slots(kv_heads=kv_heads)
    output, _ = slot_attention(None, query, keys, values, hidden(positions, 40, query.dtype), scaling=SCALING)
    torch.testing.assert_close(output, reference(query, keys, values, positions), atol=1e-5, rtol=1e-5)


def test_whole_sequences_go_through_transformers_sdpa():
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    query, keys, values = torch.randn(2, 6, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    ours, _ = slot_attention(module, query, keys, values, None, scaling=SCALING)
    theirs, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, keys, values, None, scaling=SCALING)
    assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_the_kernel_reads_each_slot_up_to_its_own_end(kv_heads, width):
    query, keys, values, positions = slots(kv_heads=kv_heads, width=width, device="cuda", dtype=torch.bfloat16)
    for row, position in enumerate(positions.tolist()):  # what lies beyond a sequence must not be read
        keys[row, :, position + 1 :] = values[row, :, position + 1 :] = torch.nan
    with attending_to(SlotSequences.of(positions, 40)):
        output, _ = slot_attention(None, query, keys, values, None, scaling=SCALING)
    torch.testing.assert_close(output.float(), reference(query, keys, values, positions), atol=2e-2, rtol=2e-2)
