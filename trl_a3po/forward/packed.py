"""One forward of a packed row through a causal language model that TRL has given its fused head.

Guarantees: the model is called as TRL calls it (wrappers, adapters, autocast, gradient checkpointing and hooks see one
forward), and its head scores only the hidden states that predict a completion token. The head computes log-probs and
entropies in tiles of at most 4096 tokens by 32768 entries of the vocabulary, forward and backward, so no larger matrix
of logits exists in any dtype.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from trl_a3po.forward.attention import NO_MASK
from trl_a3po.forward.layout import PackedBatch


def packed_logps(
    model: torch.nn.Module,
    base: PreTrainedModel,
    input_ids: torch.Tensor,
    packed: PackedBatch,
    completion_width: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies `(B, T)` of the completion tokens, 0 at padding, at the temperature of the head.

    Args:
        model: what to call: `base`, or a wrapper around it.
        base: the model inside, with packed attention installed.
        input_ids: `(B, S)`.
        packed: the same rows, packed.
        completion_width: T.
    """
    device, flat = input_ids.device, input_ids.reshape(-1)
    scoring, places = packed.scoring.to(device), packed.places.to(device)
    with _only_hidden_states(base, scoring):
        outputs = model(
            input_ids=flat[packed.tokens.to(device)][None],
            attention_mask=torch.empty(NO_MASK, dtype=torch.bool, device=device),
            position_ids=packed.positions.to(device)[None],
            shift_labels=flat[packed.targets.to(device)][None],
            fused_lm_head=True,
            packed_row=packed.row,
        )
    shape = (len(input_ids), completion_width)
    entropy = None if outputs.entropy is None else _scattered(outputs.entropy, places, shape)
    return _scattered(outputs.log_probs, places, shape), entropy


@contextmanager
def _only_hidden_states(base: PreTrainedModel, scoring: torch.Tensor) -> Iterator[None]:
    """Inside, the head gets only the hidden states of the backbone at the places `scoring`, `(M,)`, in that order.

    Forwards of other threads, such as that of a reward function that runs the policy, are left alone."""
    owner = threading.get_ident()

    def select(module: torch.nn.Module, args: Any, outputs: Any) -> Any:
        if threading.get_ident() != owner:
            return outputs
        outputs.last_hidden_state = outputs.last_hidden_state[:, scoring]
        return outputs

    hook = base.base_model.register_forward_hook(select)
    try:
        yield
    finally:
        hook.remove()


def _scattered(values: torch.Tensor, places: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """`values` `(1, M)` at the flat `places` of a tensor of this shape, which is 0 elsewhere."""
    return values.new_zeros(shape[0] * shape[1]).index_copy(0, places.to(values.device), values[0]).view(shape)
