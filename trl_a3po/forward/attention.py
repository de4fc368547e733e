"""Attention over a packed row, as an attention implementation of transformers.

Guarantees: a token attends to the tokens of its own sequence up to itself, within the layer's sliding window by
position, and to nothing else; a forward without a packed row is transformers' `sdpa`, with the same masks. The
implementation stays set on the model until training ends, because gradient checkpointing runs attention again during
the backward.

A forward receives the row as the keyword argument `packed_row`, which the decoders of transformers pass on to every
attention layer, together with a mask of shape `NO_MASK`: transformers leaves a 4D mask as it is. Without a mask it
would guess sequences from the positions, and take completions that continue a shared prompt for separate sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_a3po.forward.layout import PackedRow, Segment
from trl_a3po.forward.varlen import varlen_attention, varlen_refusal

PLAIN, PACKED = "sdpa", "a3po_packed_sdpa"
NO_MASK = (1, 1, 0, 0)  # shape of the mask that accompanies a packed row
# Segments are attended to together up to this many tokens: fewer calls, at the price of a mask that hides some pairs.
BLOCK_TOKENS = 256


def install_packed_attention(model: PreTrainedModel) -> None:
    """Make `model`, whose attention implementation is `sdpa`, accept packed rows too."""
    if model.config._attn_implementation == PACKED:
        return
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS[PLAIN])
    model.set_attn_implementation(PACKED)


def remove_packed_attention(model: PreTrainedModel) -> None:
    """Undo `install_packed_attention`, if it was called."""
    if model.config._attn_implementation == PACKED:
        model.set_attn_implementation(PLAIN)


def plain_implementation(name: str) -> str:
    """The attention implementation that a model had before `install_packed_attention`, given its present one."""
    return PLAIN if name == PACKED else name


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_row: PackedRow | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' form: `(B, H, N, D)` queries, `(B, H_kv, N, D)` keys and values -> `(B, N, H, D)`."""
    if packed_row is None:
        if attention_mask is not None and tuple(attention_mask.shape) == NO_MASK:
            raise RuntimeError(
                f"{type(module).__name__} received no packed row, because its model does not pass keyword arguments "
                "on to attention: set packed_forward='off'."
            )
        output, _ = ALL_ATTENTION_FUNCTIONS[PLAIN](
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        )
        return output, None
    query, key, value = in_autocast_dtype(query, key, value)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    refusal = varlen_refusal(query, packed_row, sliding_window)
    packed_row.cache["kernel"] = "FlashAttention" if refusal is None else f"SDPA ({refusal})"
    attend = varlen_attention if refusal is None else blockwise_attention
    return attend(query, key, value, packed_row, scaling, sliding_window), None


def in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast `tensors` to the dtype of autocast, under which norms and rotary embeddings leave queries and keys in
    float32 and values in half precision."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def blockwise_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: PackedRow,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Attention block by block with torch's SDPA, on any device and in any dtype. Shapes as `packed_attention`'s."""
    if window not in row.cache:
        row.cache[window] = attention_blocks(row, window, query.device)
    repeats = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
    outputs = [
        scaled_dot_product_attention(
            query[:, :, block.queries],
            _select_tokens(key, block.keys),
            _select_tokens(value, block.keys),
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=scaling,
        )
        for block in row.cache[window]
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Block:
    """Queries of a packed row, the keys that some of them attend to, and a `(queries, keys)` bool mask of which keys
    each query attends to; `None` for a causal mask."""

    queries: slice
    keys: tuple[slice, ...]
    mask: torch.Tensor | None


def attention_blocks(row: PackedRow, window: int | None, device: torch.device) -> list[Block]:
    """Blocks that cover the row, in its order."""
    blocks: list[Block] = []
    bundle: list[Segment] = []
    for segment in row.segments:
        if bundle and (segment.prefix != bundle[0].prefix or segment.end - bundle[0].start > BLOCK_TOKENS):
            blocks.append(_block(row, bundle, window, device))
            bundle = []
        bundle.append(segment)
    blocks.append(_block(row, bundle, window, device))
    return blocks


def _block(row: PackedRow, bundle: list[Segment], window: int | None, device: torch.device) -> Block:
    queries = slice(bundle[0].start, bundle[-1].end)
    prefix = None if bundle[0].prefix is None else row.segments[bundle[0].prefix]
    if prefix is None and len(bundle) == 1 and (window is None or bundle[0].length <= window):
        return Block(queries, (queries,), None)
    number = torch.cat([torch.full((s.length,), i) for i, s in enumerate(bundle)])
    position = torch.cat([row.offset(s) + torch.arange(s.length) for s in bundle])
    mask = (number[:, None] == number) & (position[:, None] >= position)
    if window is not None:
        mask &= position[:, None] - position < window
    if prefix is None:
        return Block(queries, (queries,), mask.to(device))
    to_prefix = torch.ones(len(position), prefix.length, dtype=torch.bool)
    if window is not None:
        to_prefix = position[:, None] - torch.arange(prefix.length) < window
    return Block(queries, (prefix.tokens, queries), torch.cat([to_prefix, mask], dim=1).to(device))


def _select_tokens(tensor: torch.Tensor, places: tuple[slice, ...]) -> torch.Tensor:
    parts = [tensor[:, :, place] for place in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
