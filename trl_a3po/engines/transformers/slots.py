"""Where each slot of a decoder stands: last token, position, noise, and the tokens its sequence has seen.

Guarantees: everything is indexed by slot; a slot that is moved takes all of it along.
"""

from collections.abc import Sequence

import numpy as np
import torch

from trl_a3po.engines.transformers.sampling import uniform_noise


class Slots:
    """
    Args:
        rows: slots, and, in deterministic mode, those that fill them up to a multiple of 8.
        seen: keep which tokens a sequence has seen, of so many; `None`: nothing needs it.
        device: where the tensors go.
    """

    def __init__(self, rows: int, *, seen: int | None, device: torch.device):
        self._device = device
        self.token = np.zeros(rows, dtype=np.int64)  # sampled last
        self.position = np.zeros(rows, dtype=np.int64)  # of that token, whose key and value are not cached yet
        self.generated = np.zeros(rows, dtype=np.int64)
        self._stream = np.zeros(rows, dtype=np.uint64)
        self._first = np.zeros(rows, dtype=np.int64)  # place in the completion of the first token of this turn
        self._seen = None if seen is None else torch.zeros(rows, seen, dtype=torch.bool, device=device)

    def __len__(self) -> int:
        return len(self.position)

    def occupy(self, slot: int, prompt_ids: Sequence[int], stream: int, first_position: int) -> None:
        """A new sequence begins after its prompt, with the noise of `stream` from `first_position` on."""
        self.position[slot] = len(prompt_ids) - 1
        self._stream[slot] = stream
        self._first[slot], self.generated[slot] = first_position, 0
        if self._seen is not None:
            self._seen[slot] = False
            self._seen[slot, torch.tensor(prompt_ids, device=self._device)] = True

    def advance(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """One more token `(N,)` in each of `slots` `(N,)`."""
        self.token[slots] = tokens
        self.position[slots] += 1
        self.generated[slots] += 1
        if self._seen is not None:
            self._seen[self.on_device(slots), self.on_device(tokens)] = True

    def move(self, source: int, target: int) -> None:
        for array in (self.token, self.position, self._stream, self._first, self.generated):
            array[target] = array[source]
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    def park(self, first: int) -> None:
        """Rows from `first` on, which hold no sequence, decode the same nothing whatever was there."""
        self.position[first:] = self.token[first:] = 0

    def noise(self, slots: np.ndarray | slice) -> torch.Tensor:
        """What the next token of each is drawn with: a function of its stream and its place in the completion."""
        return self.on_device(uniform_noise(self._stream[slots], self._first[slots] + self.generated[slots]))

    def seen(self, slots: np.ndarray | slice) -> torch.Tensor | None:
        """`(N, V)` bool: the tokens that each sequence has seen, its prompt's included."""
        if self._seen is None:
            return None
        return self._seen[slots if isinstance(slots, slice) else torch.from_numpy(slots).to(self._device)]

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
