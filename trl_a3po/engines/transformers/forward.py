"""The forward of the model as the decoder uses it: a prefill of whole sequences, several new tokens behind what slots
hold, and a decode step of one token per slot. All return logits.

A token has a place, which is where its key and value are kept, and a position, which is what the model is told. They
are the same unless an image comes before the token (`image_inputs.py`).

Guarantees: only the last position of a sequence goes through the output layer; a decode step reads nothing back from
the device, and the others do not wait for it either.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trl_a3po.engines.transformers.architecture import check_architecture
from trl_a3po.engines.transformers.attention import (
    NO_MASK,
    PLAIN,
    SLOTS,
    SlotSequences,
    attending_to,
    install_slot_attention,
)
from trl_a3po.engines.transformers.cache import NewTokens, PrefillCache, SlotCache, SlotExtension
from trl_a3po.engines.transformers.image_inputs import ImageInputs
from trl_a3po.models.attention_shape import head_dim
from trl_a3po.models.flash_kernels import kernel_refusal
from trl_a3po.models.unwrap import base_model
from trl_a3po.protocol.images import PromptImages

Mask = torch.Tensor | dict[str, torch.Tensor]
"""What to add to attention scores, for all layers or by layer type."""


class ModelForward:
    """Prefill and decode on `model`.

    Args:
        model: a causal language model, which may read images, or a `PeftModel` around one.
        device: where the model lives; `None`: the device of its embeddings.
        deterministic: use the attention backend that does not depend on the batch.

    Raises:
        ValueError: the architecture, its attention implementation or its positions are not supported.
    """

    def __init__(
        self, model: torch.nn.Module, *, device: torch.device | str | None = None, deterministic: bool = False
    ):
        base = base_model(model)
        self._model = model.eval()
        config = base.config.get_text_config()
        embeddings = base.get_input_embeddings()
        weight = cast(torch.Tensor, embeddings.weight)
        self.device: torch.device = torch.device(device) if device is not None else weight.device
        self._dtype: torch.dtype = weight.dtype
        self._deterministic = deterministic
        parameters = inspect.signature(type(base).forward).parameters
        self._window, self._by_layer_type = check_architecture(model, deterministic=deterministic)
        # The argument's name changed in transformers 5.2x.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.vocab_size = weight.shape[0]  # not `num_embeddings`, which an adapted embedding does not have
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.image_inputs = ImageInputs(base, self.device)
        self._slot_attention = base.config._attn_implementation in (PLAIN, SLOTS) and (
            self.device.type == "cuda" and not deterministic
        )
        if self._slot_attention:
            install_slot_attention(base)
        self._flash = (
            self._slot_attention
            and self._window is None
            and (kernel_refusal(self.device, self._dtype, head_dim(config)) is None)
        )

    def prefill(self, sequences: Sequence[Sequence[int]], pad_to: int) -> tuple[torch.Tensor, PrefillCache]:
        """The logits `(P, V)` after the last token of each sequence, and the keys and values of all their tokens.

        Sequences are padded on the right: causal attention hides the padding from every token before it.
        """
        kept, picked = _last_positions(sequences)
        logits, cache = self._prefill(sequences, pad_to, kept)
        return logits[tuple(self._sent(picked))], cache

    def prefill_images(
        self, sequence: Sequence[int], images: PromptImages, pad_to: int
    ) -> tuple[torch.Tensor, PrefillCache, int, int]:
        """As `prefill`, of one sequence that begins with a prompt with images: the logits `(V,)`, the keys and values,
        the sequence's row in them, and how far the positions of the tokens that follow are ahead of their places."""
        ids = self._padded([sequence], pad_to)
        fields = images.over(pad_to, self.device)
        positions, ahead = self.image_inputs.places(ids, fields, len(sequence))
        cache, last = PrefillCache(), self._sent(torch.tensor([len(sequence) - 1]))
        return self._forward(ids, last, cache, None, positions, **fields)[0, 0], cache, 0, ahead

    def extend(
        self,
        sequences: Sequence[Sequence[int]],
        pad_to: int,
        cache: SlotCache,
        slots: Sequence[int],
        starts: Sequence[int],
        ahead: Sequence[int],
    ) -> torch.Tensor:
        """The logits `(P, V)` after the last of each slot's new tokens, whose keys and values are put into `cache`.

        Args:
            sequences: P of them, the new tokens of each slot.
            pad_to: at least the length of the longest.
            slots: P of them.
            starts: the place of each slot's first new token. What the slot holds before it is kept.
            ahead: how far the positions of each slot's tokens are ahead of their places.
        """
        kept, picked = _last_positions(sequences)
        lengths = [len(sequence) for sequence in sequences]
        real = [(row, column) for row, length in enumerate(lengths) for column in range(length)]
        rows, columns = self._sent(torch.tensor(real)).T
        ends = [n + k - 1 for n, k in zip(starts, lengths, strict=True)]
        first, last, lead = self._sent(torch.tensor([starts, ends, ahead]))
        # Padding sits at the last place of its row, whose position is one that the model has.
        places = torch.minimum(first[:, None] + torch.arange(pad_to, device=self.device), last[:, None])
        length = max(start + new for start, new in zip(starts, lengths, strict=True))
        cache.reserve(length)
        new = NewTokens(self._sent(torch.tensor(slots)), rows, columns, places[rows, columns], length)
        ids, logits_at = self._padded(sequences, pad_to), self._sent(torch.tensor(kept))
        positions = self.image_inputs.positions(places + lead[:, None])
        logits = self._forward(ids, logits_at, SlotExtension(cache, new), self._masks(places, length), positions)
        return logits[tuple(self._sent(picked))]

    def extend_images(
        self, sequence: Sequence[int], images: PromptImages, cache: SlotCache, slot: int, start: int
    ) -> tuple[torch.Tensor, int]:
        """As `extend`, of one slot whose new tokens show images: the logits `(V,)`, and how far the positions of the
        tokens that follow are ahead of their places.

        Args:
            sequence: all of its tokens.
            images: all of its images. Those `added` belong to the new tokens, and no others are encoded.
            start: the place of the first new token.
        """
        assert images.added is not None, "new tokens show new images"
        length, inputs = len(sequence), self.image_inputs
        whole, ids = images.over(length, self.device), self._sent(torch.tensor([list(sequence)]))
        positions, ahead = inputs.places(ids, whole, length)
        places = torch.arange(start, length, device=self.device)
        row, column = torch.zeros_like(places), places - start
        cache.reserve(length)
        new = NewTokens(self._sent(torch.tensor([slot])), row, column, places, length)
        masks = self._masks(places[None], length, inputs.blocks(whole))
        fields = inputs.added(images, whole, start)
        logits = self._forward(ids[:, start:], 1, SlotExtension(cache, new), masks, positions[..., start:], **fields)
        return logits[0, 0], ahead

    def prefill_cache(self, sequences: Sequence[Sequence[int]], pad_to: int) -> PrefillCache:
        """The keys and values of `prefill` alone."""
        return self._prefill(sequences, pad_to, [len(sequences[0]) - 1])[1]

    def _prefill(
        self, sequences: Sequence[Sequence[int]], pad_to: int, kept: Sequence[int]
    ) -> tuple[torch.Tensor, PrefillCache]:
        """The logits `(P, len(kept), V)` at the positions `kept`, and the keys and values."""
        cache = PrefillCache()
        positions = self.image_inputs.positions(torch.arange(pad_to, device=self.device)[None])
        logits_at = self._sent(torch.tensor(kept))
        return self._forward(self._padded(sequences, pad_to), logits_at, cache, None, positions), cache

    def _padded(self, sequences: Sequence[Sequence[int]], pad_to: int) -> torch.Tensor:
        return self._sent(torch.tensor([[*sequence, *[0] * (pad_to - len(sequence))] for sequence in sequences]))

    def completion_logits(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> torch.Tensor:
        """The logits `(T, V)` that each of the T completion tokens is drawn from, by one forward over the whole."""
        ids = torch.tensor([[*prompt_ids, *completion_ids[:-1]]], device=self.device)
        positions = self.image_inputs.positions(torch.arange(ids.shape[1], device=self.device)[None])
        return self._forward(ids, len(completion_ids), PrefillCache(), None, positions)[0]

    def reads_whole_capacity(self, cache: SlotCache) -> bool:
        """Whether `decode` takes the cache's capacity as its `length`, because attention finds the end of each
        sequence by itself."""
        return self._flash and cache.same_width

    def decode(
        self, tokens: torch.Tensor, places: torch.Tensor, ahead: torch.Tensor, cache: SlotCache, length: int
    ) -> torch.Tensor:
        """Logits `(N, V)` of the first N slots after `tokens` `(N,)` at `places` `(N,)`, all below `length`, whose
        positions are `ahead` `(N,)` of these."""
        cache.aim(places, length)
        positions = self.image_inputs.positions((places + ahead)[:, None])
        if self.reads_whole_capacity(cache):
            nothing = torch.empty(NO_MASK, dtype=self._dtype, device=self.device)
            with attending_to(SlotSequences.of(places, length)):
                return self._forward(tokens[:, None], 1, cache, nothing, positions)[:, -1]
        return self._forward(tokens[:, None], 1, cache, self._masks(places[:, None], length), positions)[:, -1]

    def _masks(self, places: torch.Tensor, length: int, blocks: torch.Tensor | None = None) -> Mask:
        """For tokens at `places` `(N, E)` of sequences of at most `length`. Tokens with the same number in `blocks`
        `(N, length)` see each other, whichever comes first; 0 is no block."""
        keys, queries = torch.arange(length, device=self.device), places[:, :, None]
        filled = keys <= queries
        near = filled if self._window is None else filled & (keys > queries - self._window)
        if blocks is not None:
            own = blocks.gather(1, places)[:, :, None]
            together = (own == blocks[:, None]) & (own > 0)
            filled, near = filled | together, near | together
        if self._window is None or not self._by_layer_type:
            return self._mask(near)
        return {"full_attention": self._mask(filled), "sliding_attention": self._mask(near)}

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copied from the host to the device, behind what the device is doing."""
        return tensor.to(self.device, non_blocking=True)

    def _forward(
        self,
        ids: torch.Tensor,
        logits_to_keep: torch.Tensor | int,
        cache: PrefillCache | SlotCache | SlotExtension,
        mask: Mask | None,
        positions: torch.Tensor,
        **images: torch.Tensor,
    ) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH) if self._deterministic else nullcontext():
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self._cache_name: cache},
                **images,
            )
        logits: torch.Tensor = output.logits
        return logits

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """What to add to attention scores: `(N, E, L)` bool to `(N, 1, E, L)`, 0 where visible."""
        hidden = torch.full(visible.shape, -torch.inf, dtype=self._dtype, device=visible.device)
        return hidden.masked_fill_(visible, 0.0)[:, None]


def _last_positions(sequences: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
    """The positions of the last tokens of P sequences, each once, and `(2, P)`: the row of each sequence, and which of
    these positions is its own."""
    ends = [len(sequence) - 1 for sequence in sequences]
    kept = sorted(set(ends))
    return kept, torch.tensor([range(len(ends)), [kept.index(end) for end in ends]])
