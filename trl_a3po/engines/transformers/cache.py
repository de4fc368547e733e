"""Keys and values: what a prefill leaves (`PrefillCache`), where decoding keeps them (`SlotCache`), and how new tokens
are put behind what slots hold (`SlotExtension`).

All speak the part of transformers' cache interface that a decoder's attention layers use, and nothing else.
Guarantees: a slot's row holds one sequence from position 0 on, without gaps; what lies beyond a sequence's length is
finite and must be masked.
"""

from dataclasses import dataclass
from typing import Any

import torch

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class PrefillCache:
    """Collects the keys and values `(P, kv_heads, L, head_dim)` of one forward over P whole sequences."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> KeysAndValues:
        if layer != len(self.keys):
            raise ValueError(
                f"Layer {layer} wrote to the cache out of turn (expected layer {len(self.keys)}): layers that share "
                "or skip caches cannot be sampled from by this engine. Use engine='vllm'."
            )
        self.keys.append(keys)
        self.values.append(values)
        return keys, values

    @property
    def length(self) -> int:
        return self.keys[0].shape[2]

    def row(self, row: int, length: int) -> "PrefillCache":
        """A copy of one sequence's first `length` positions, so that the rest can be freed."""
        kept = PrefillCache()
        kept.keys = [keys[row : row + 1, :, :length].clone() for keys in self.keys]
        kept.values = [values[row : row + 1, :, :length].clone() for values in self.values]
        return kept

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def get_query_offset(self, layer: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer: int) -> tuple[int, int]:
        return query_length, 0


@dataclass(frozen=True, eq=False)
class NewTokens:
    """New tokens of P sequences, padded to E on the right, and where their keys and values belong.

    Args:
        slots: `(P,)`.
        rows, columns: `(M,)`, which of the `(P, E)` tokens are no padding.
        places: `(M,)`, the positions of these in their sequences.
        length: of the longest sequence, the new tokens included.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    places: torch.Tensor
    length: int


class SlotCache:
    """Preallocated keys and values `(slots, capacity, kv_heads, head_dim)` per layer; the capacity grows on demand.

    Shapes and dtype are those of the first prefill.
    """

    def __init__(self, slots: int):
        self._slots = slots
        self._capacity = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._rows = self._length = 0
        self._at: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def capacity(self) -> int:
        """Positions of a slot. The tensors stay where they are as long as it does not change."""
        return self._capacity

    @property
    def same_width(self) -> bool:
        """Whether keys are as wide as values, in every layer."""
        return all(keys.shape[-1] == values.shape[-1] for keys, values in zip(self._keys, self._values, strict=True))

    def write(self, slots: torch.Tensor, prefill: PrefillCache, rows: torch.Tensor, capacity: int) -> None:
        """Copy the prefilled sequences `rows` (one row may go to several slots) into `slots`, `(N,)` both.

        `capacity`: positions to make room for.
        """
        length = prefill.length
        if not self._keys:
            self._allocate(max(capacity, length), prefill)
        self.reserve(max(capacity, length))
        for mine, new in zip(self._keys + self._values, prefill.keys + prefill.values, strict=True):
            mine[slots, :length] = new[rows].transpose(1, 2)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a sequence's first `length` positions to another slot."""
        for mine in self._keys + self._values:
            mine[target, :length] = mine[source, :length]

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        for mine in self._keys + self._values:
            held = mine[one, :length].clone()
            mine[one, :length] = mine[other, :length]
            mine[other, :length] = held

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in every slot."""
        if length <= self._capacity:
            return
        old, self._capacity = self._capacity, max(length, self._capacity * 3 // 2)
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):  # one at a time: the peak is one layer above the final size
                tensors[layer] = self._empty(tensor, tensor.shape[2])
                tensors[layer][:, :old] = tensor

    def aim(self, positions: torch.Tensor, length: int) -> None:
        """Next forward: one token for each of the first N slots, at `positions` `(N,)`; attention reads `length`,
        for which there is room."""
        self._rows = len(positions)
        self._length = length
        self._at = (torch.arange(self._rows, device=positions.device), positions)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> KeysAndValues:
        assert self._at is not None, "aim is called before each forward"
        mine_keys, mine_values = self._keys[layer], self._values[layer]
        mine_keys[self._at] = keys[:, :, 0]
        mine_values[self._at] = values[:, :, 0]
        read = slice(self._rows), slice(self._length)
        return mine_keys[read].transpose(1, 2), mine_values[read].transpose(1, 2)

    def extend(self, keys: torch.Tensor, values: torch.Tensor, layer: int, new: "NewTokens") -> KeysAndValues:
        """Put the keys and values `(P, kv_heads, E, head_dim)` of a layer behind what the slots hold. Returns those of
        the slots' sequences, `(P, kv_heads, new.length, head_dim)`."""
        mine_keys, mine_values = self._keys[layer], self._values[layer]
        for mine, added in ((mine_keys, keys), (mine_values, values)):
            mine[new.slots[new.rows], new.places] = added.transpose(1, 2)[new.rows, new.columns]
        read = new.slots, slice(new.length)
        return mine_keys[read].transpose(1, 2), mine_values[read].transpose(1, 2)

    def get_seq_length(self, layer: int = 0) -> int:
        return self._length - 1

    def get_query_offset(self, layer: int = 0) -> int:
        return self._length - 1

    def get_mask_sizes(self, query_length: int, layer: int) -> tuple[int, int]:
        return self._length, 0

    def _allocate(self, length: int, like: PrefillCache) -> None:
        self._capacity = length
        self._keys = [self._empty(keys, keys.shape[1]) for keys in like.keys]
        self._values = [self._empty(values, values.shape[1]) for values in like.values]

    def _empty(self, like: torch.Tensor, heads: int) -> torch.Tensor:
        # Zeros, not empty: a masked position still enters the weighted sum as 0 times its value.
        return like.new_zeros(self._slots, self._capacity, heads, like.shape[3])


class SlotExtension:
    """A `SlotCache` in a forward over several new tokens of some slots. There is room for them."""

    def __init__(self, cache: SlotCache, new: NewTokens):
        self._cache = cache
        self._new = new

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> KeysAndValues:
        return self._cache.extend(keys, values, layer, self._new)

    def get_seq_length(self, layer: int = 0) -> int:
        return self._new.length

    def get_query_offset(self, layer: int = 0) -> int:
        return self._new.length

    def get_mask_sizes(self, query_length: int, layer: int) -> tuple[int, int]:
        return self._new.length, 0
