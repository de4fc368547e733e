"""Where each slot of a decoder stands: last token, place, noise, and the tokens its sequence has seen.

Guarantees: everything is indexed by slot; a slot that is moved takes all of it along. What a decode step reads lies in
tensors that never move in memory. The host knows places and noise in advance; the last tokens are known to the
device alone, which feeds them to its next step.
"""

from collections.abc import Sequence

import numpy as np
import torch

from trl_a3po.engines.transformers.sampling import uniform_noise

_PLACE, _NOISE, _GENERATED, _AHEAD = range(4)


class Slots:
    """
    Args:
        rows: slots, and, in deterministic mode, those that fill them up to a multiple of 8.
        seen: keep which tokens a sequence has seen, of so many; `None`: nothing needs it.
        device: where the tensors go.
    """

    def __init__(self, rows: int, *, seen: int | None, device: torch.device):
        self._device = device
        self.place = np.zeros(rows, dtype=np.int64)  # of the last token, whose key and value are not cached yet
        self.ahead = np.zeros(rows, dtype=np.int64)  # of its place is the position of the last token
        self._generated = np.zeros(rows, dtype=np.int64)
        self._stream = np.zeros(rows, dtype=np.uint64)
        self._first = np.zeros(rows, dtype=np.int64)  # place in the completion of the first token of this turn
        self._sent = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self._token = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seen = None if seen is None else torch.zeros(rows, seen, dtype=torch.bool, device=device)

    def __len__(self) -> int:
        return len(self.place)

    def occupy(self, slot: int, prompt_ids: Sequence[int], stream: int, first_position: int) -> None:
        """A new sequence begins after its prompt, with the noise of `stream` from `first_position` on."""
        self.place[slot] = len(prompt_ids) - 1
        self._stream[slot] = stream
        self._first[slot], self._generated[slot] = first_position, 0
        if self._seen is not None:
            self._seen[slot] = False
            self._seen[slot, self.on_device(np.array(prompt_ids))] = True

    def move(self, source: int, target: int) -> None:
        for array in (self.place, self.ahead, self._stream, self._first, self._generated):
            array[target] = array[source]
        self._token[target] = self._token[source]
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    def rest(self, slots: Sequence[int]) -> None:
        """These rows, which hold no sequence, decode place 0 whatever was there."""
        self.place[slots] = 0

    def advance(self, slots: np.ndarray) -> None:
        """One more token in each of `slots` `(N,)`."""
        self.place[slots] += 1
        self._generated[slots] += 1

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    # --- what the next tokens are drawn with: of any slots, sent from the host ------------------------------------

    def noise(self, slots: np.ndarray) -> torch.Tensor:
        """A function of each slot's stream and its place in the completion."""
        return self.on_device(uniform_noise(self._stream[slots], self._first[slots] + self._generated[slots]))

    def generated(self, slots: np.ndarray) -> torch.Tensor:
        """Tokens of each turn so far."""
        return self.on_device(self._generated[slots])

    def seen(self, slots: np.ndarray) -> torch.Tensor | None:
        """`(N, V)` bool: the tokens that each sequence has seen, its prompt's included."""
        return None if self._seen is None else self._seen[self.on_device(slots)]

    def take(self, slots: np.ndarray, tokens: torch.Tensor) -> None:
        """`tokens` `(N,)` on the device were drawn for `slots`."""
        places = self.on_device(slots)
        self._token[places] = tokens
        if self._seen is not None:
            self._seen[places, tokens] = True

    # --- the same of the first rows, in tensors that stay where they are --------------------------------------------

    def send(self) -> None:
        """Bring the device's places, noise and counts up to date, in one transfer."""
        noise = uniform_noise(self._stream, self._first + self._generated)
        rows = np.stack([self.place, noise.view(np.int64), self._generated, self.ahead])
        self._sent.copy_(torch.from_numpy(rows), True)

    def first_tokens(self, rows: int) -> torch.Tensor:
        return self._token[:rows]

    def first_places(self, rows: int) -> torch.Tensor:
        return self._sent[_PLACE, :rows]

    def first_ahead(self, rows: int) -> torch.Tensor:
        return self._sent[_AHEAD, :rows]

    def first_noise(self, rows: int) -> torch.Tensor:
        return self._sent[_NOISE, :rows].view(torch.float64)

    def first_generated(self, rows: int) -> torch.Tensor:
        return self._sent[_GENERATED, :rows]

    def first_seen(self, rows: int) -> torch.Tensor | None:
        return None if self._seen is None else self._seen[:rows]

    def take_first(self, tokens: torch.Tensor) -> None:
        """`tokens` `(N,)` were drawn for the first N slots."""
        rows = len(tokens)
        self._token[:rows] = tokens
        if self._seen is not None:
            self._seen[torch.arange(rows, device=self._device), tokens] = True
