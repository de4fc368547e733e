"""Attention of one new token per slot to the slot's own sequence, as an attention implementation of transformers.

Guarantees: a decode step with `SlotSequences` reads only the filled part of the cache, with the FlashAttention kernel
that comes with torch; with a mask instead, keys and values are not repeated for grouped queries; any other forward is
transformers' `sdpa`. Nothing in a decode step reads a number from the device, so it can be captured as a CUDA graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PLAIN, SLOTS = "sdpa", "a3po_slots_sdpa"
NO_MASK = (1, 1, 0, 0)
"""Shape of the mask that accompanies `SlotSequences`: transformers leaves a 4D mask as it is."""


@dataclass(frozen=True, eq=False)
class SlotSequences:
    """Where the keys of each slot lie, as the kernel takes it.

    Args:
        lengths: `(N,)` int32, tokens of each slot, the new one included.
        capacity: positions of a slot in the cache.
        queries: `(N + 1,)` int32, 0 to N.
        keys: `(N + 1,)` int32, where each slot begins among the keys of all slots.
    """

    lengths: torch.Tensor
    capacity: int
    queries: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor, capacity: int) -> "SlotSequences":
        """The new tokens are at `positions` `(N,)`."""
        slots = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        return cls((positions + 1).int(), capacity, slots, slots * capacity)


_sequences: ContextVar[SlotSequences | None] = ContextVar("slot sequences", default=None)


@contextmanager
def attending_to(sequences: SlotSequences | None) -> Iterator[None]:
    """Inside the context, attention takes `sequences` instead of a mask, unless they are `None`."""
    token = _sequences.set(sequences)
    try:
        yield
    finally:
        _sequences.reset(token)


def install_slot_attention(model: PreTrainedModel) -> None:
    """Have `model`, whose attention implementation is `sdpa`, use `slot_attention`."""
    if model.config._attn_implementation != SLOTS:
        AttentionInterface.register(SLOTS, slot_attention)
        AttentionMaskInterface.register(SLOTS, ALL_MASK_ATTENTION_FUNCTIONS[PLAIN])
        model.set_attn_implementation(SLOTS)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' form: `(N, H, L, D)` queries, `(N, H_kv, K, D)` keys and values -> `(N, L, H, D)`."""
    sequences = _sequences.get()
    if sequences is not None:
        return _flash(query, key, value, sequences, scaling), None
    if query.shape[2] == 1 and attention_mask is not None and attention_mask.shape[1] == 1:
        return grouped_sdpa(query, key, value, attention_mask, scaling), None
    output, _ = ALL_ATTENTION_FUNCTIONS[PLAIN](module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return output, None


def grouped_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of one token `(N, H, 1, D)`, with a mask `(N, 1, 1, K)` that all heads share: the queries that read
    the same keys go in as if they were positions."""
    rows, heads, _, width = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[-1])


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: SlotSequences, scaling: float | None
) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query[:, :, 0],
        key.transpose(1, 2).flatten(0, 1),
        value.transpose(1, 2).flatten(0, 1),
        sequences.queries,
        sequences.keys,
        1,
        sequences.capacity,
        0.0,
        False,
        False,
        scale=scaling,
        seqused_k=sequences.lengths,
    )[0]
    return output[:, None]
