"""The model as the decoder sees it: whole sequences in (prefill), one token a slot in (decode), logits out.

Guarantees: only the last position of a sequence goes through the output layer; architectures whose cache or mask
this engine does not know are refused by name.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from peft import PeftModel
from torch.nn.attention import SDPBackend, sdpa_kernel

from trl_a3po.engines.embedded.cache import PrefillCache, SlotCache

_LAYERS = {"full_attention", "sliding_attention"}
# Their forward takes one mask per layer type.
_MASK_BY_LAYER_TYPE = {
    "cohere2",
    "cwm",
    "dots1",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "ministral",
    "olmo3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "smollm3",
    "vaultgemma",
}
# All their layers slide when the configuration holds a window.
_ALL_LAYERS_SLIDE = {"ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
# How configurations call the number of experts of a mixture.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class ModelForward:
    """Prefill and decode on `model`.

    Args:
        model: a causal language model, or a `PeftModel` around one.
        device: where the model lives; `None`: the device of its embeddings.
        deterministic: use the attention backend that does not depend on the batch.

    Raises:
        ValueError: the architecture, its attention implementation or its positions are not supported.
    """

    def __init__(
        self, model: torch.nn.Module, *, device: torch.device | str | None = None, deterministic: bool = False
    ):
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        self._model = model.eval()
        self._config = config = base.config.get_text_config()
        self.device = torch.device(device) if device is not None else base.get_input_embeddings().weight.device
        self._dtype = base.get_input_embeddings().weight.dtype
        self._deterministic = deterministic
        parameters = inspect.signature(type(base).forward).parameters
        self._window, self._by_layer_type = check_architecture(model, deterministic=deterministic)
        # The argument's name changed in transformers 5.2x.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.vocab_size: int = base.get_input_embeddings().num_embeddings
        self.context: int | None = getattr(config, "max_position_embeddings", None)

    def prefill(
        self, sequences: Sequence[Sequence[int]], pad_to: int, logits: bool = True
    ) -> tuple[torch.Tensor | None, PrefillCache]:
        """The logits `(P, V)` after the last token of each sequence, and the keys and values of all their tokens.

        Sequences are padded on the right: causal attention hides the padding from every token before it.
        """
        padded = torch.tensor([[*sequence, *[0] * (pad_to - len(sequence))] for sequence in sequences])
        ends = [len(sequence) - 1 for sequence in sequences]
        kept = sorted(set(ends)) if logits else ends[:1]
        cache = PrefillCache()
        out = self._forward(
            padded.to(self.device), torch.tensor(kept, device=self.device), cache, None, torch.arange(pad_to)[None]
        )
        if not logits:
            return None, cache
        return out[torch.arange(len(ends)), torch.tensor([kept.index(end) for end in ends])], cache

    def completion_logits(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> torch.Tensor:
        """The logits `(T, V)` that each of the T completion tokens is drawn from, by one forward over the whole."""
        ids = torch.tensor([[*prompt_ids, *completion_ids[:-1]]], device=self.device)
        length = ids.shape[1]
        return self._forward(ids, len(completion_ids), PrefillCache(), None, torch.arange(length)[None])[0]

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache, length: int) -> torch.Tensor:
        """Logits `(N, V)` of the first N slots after `tokens` `(N,)` at `positions` `(N,)`, all below `length`."""
        cache.aim(positions, length)
        places = torch.arange(length, device=self.device)
        filled = places <= positions[:, None]
        mask = self._mask(filled)
        if self._window is not None:
            sliding = self._mask(filled & (places > positions[:, None] - self._window))
            mask = {"full_attention": mask, "sliding_attention": sliding} if self._by_layer_type else sliding
        return self._forward(tokens[:, None], 1, cache, mask, positions[:, None])[:, -1]

    def _forward(self, ids, logits_to_keep, cache, mask, positions) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH) if self._deterministic else nullcontext():
            return self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions.to(self.device),
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self._cache_name: cache},
            ).logits

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """What to add to attention scores: `(N, L)` bool to `(N, 1, 1, L)`, 0 where visible."""
        hidden = torch.full(visible.shape, -torch.inf, dtype=self._dtype, device=visible.device)
        return hidden.masked_fill_(visible, 0.0)[:, None, None]


def check_architecture(model: torch.nn.Module, *, deterministic: bool = False) -> tuple[int | None, bool]:
    """The sliding window, and whether only layers of one type have it.

    Raises:
        ValueError: the architecture, its attention implementation or its positions are not supported.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    config = base.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = _checked_window(config, layer_types)
    _check(model, base, config, layer_types, inspect.signature(type(base).forward).parameters)
    if deterministic and any(getattr(config, name, None) for name in _EXPERTS):
        raise ValueError(
            f"deterministic=True cannot hold for {config.model_type!r} models: how many tokens an expert computes "
            "at once depends on the rest of the batch. Set deterministic=False."
        )
    return window, "sliding_attention" in layer_types


def _checked_window(config, layer_types: set[str]) -> int | None:
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in layer_types:
        if config.model_type not in _MASK_BY_LAYER_TYPE:
            _refuse(config, "mixes sliding-window and full attention in a way this engine has not been tested with")
        return window
    if getattr(config, "layer_types", None) is not None or window is None:
        return None
    if config.model_type not in _ALL_LAYERS_SLIDE:
        _refuse(config, f"has sliding_window={window}, with which this engine has not been tested")
    return window


def _check(model, base, config, layer_types: set[str], parameters) -> None:
    if base.config.is_encoder_decoder:
        _refuse(config, "is an encoder-decoder model")
    if unknown := layer_types - _LAYERS:
        _refuse(config, f"has layers of type {sorted(unknown)}, whose state is not keys and values by position")
    if missing := {"position_ids", "logits_to_keep", "attention_mask"} - set(parameters):
        _refuse(config, f"has a forward without {sorted(missing)}")
    if not {"cache", "past_key_values"} & set(parameters):
        _refuse(config, "has no cache of keys and values")
    if getattr(config, "num_kv_shared_layers", 0):
        _refuse(config, "shares keys and values between layers")
    if getattr(config, "alibi", False):
        _refuse(config, "reads positions from its attention mask")
    rope = getattr(config, "rope_parameters", None) or {}
    for of_layer in [rope, *[value for value in rope.values() if isinstance(value, dict)]]:
        kind = of_layer.get("rope_type")
        if kind in ("dynamic", "longrope"):
            _refuse(config, f"has rope_type={kind!r}, under which a position depends on the longest of the batch")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} cannot attend to slots of different lengths here: "
            "build the engine's copy of the model with 'sdpa' or 'eager'."
        )
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"peft_type={model.active_peft_config.peft_type} puts virtual tokens into the cache, which this engine "
            "does not support: use LoRA or another adapter of weights."
        )


def _refuse(config, why: str):
    raise ValueError(
        f"The transformers engine cannot sample from {config.model_type!r} models: this one {why}. Use engine='vllm', "
        "or a decoder-only attention model."
    )
