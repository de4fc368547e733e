"""Which architectures the engine can sample from, and what it has to know about each.

Guarantees: a model whose cache or mask the engine does not know is rejected with an error that names the architecture
and what to use instead.
"""

import inspect
from collections.abc import Mapping
from typing import NoReturn

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from trl_a3po.engines.transformers.attention import PLAIN, SLOTS
from trl_a3po.models.unwrap import as_peft_model, base_model

_LAYERS = {"full_attention", "sliding_attention"}
# Architectures whose forward takes one mask per layer type.
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
# Architectures in which every layer has a sliding window when the configuration sets one.
_ALL_LAYERS_SLIDE = {"ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
# Names of the number of experts in the configurations of mixture-of-experts models.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_architecture(model: torch.nn.Module, *, deterministic: bool = False) -> tuple[int | None, bool]:
    """The size of the sliding window (`None` without one), and whether only some layers have it.

    Raises:
        ValueError: the architecture, its attention implementation or its positions are not supported.
    """
    base = base_model(model)
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


def _checked_window(config: PreTrainedConfig, layer_types: set[str]) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    if "sliding_attention" in layer_types:
        if config.model_type not in _MASK_BY_LAYER_TYPE:
            _reject(config, "mixes sliding-window and full attention in a way this engine has not been tested with")
        return window
    if getattr(config, "layer_types", None) is not None or window is None:
        return None
    if config.model_type not in _ALL_LAYERS_SLIDE:
        _reject(config, f"has sliding_window={window}, with which this engine has not been tested")
    return window


def _check(
    model: torch.nn.Module,
    base: PreTrainedModel,
    config: PreTrainedConfig,
    layer_types: set[str],
    parameters: Mapping[str, inspect.Parameter],
) -> None:
    if base.config.is_encoder_decoder:
        _reject(config, "is an encoder-decoder model")
    if unknown := layer_types - _LAYERS:
        _reject(config, f"has layers of type {sorted(unknown)}, whose state is not keys and values by position")
    if missing := {"position_ids", "logits_to_keep", "attention_mask"} - set(parameters):
        _reject(config, f"has a forward without {sorted(missing)}")
    if not {"cache", "past_key_values"} & set(parameters):
        _reject(config, "has no cache of keys and values")
    if getattr(config, "num_kv_shared_layers", 0):
        _reject(config, "shares keys and values between layers")
    if getattr(config, "alibi", False):
        _reject(config, "reads positions from its attention mask")
    rope = getattr(config, "rope_parameters", None) or {}
    for of_layer in [rope, *[value for value in rope.values() if isinstance(value, dict)]]:
        kind = of_layer.get("rope_type")
        if kind in ("dynamic", "longrope"):
            _reject(config, f"has rope_type={kind!r}, under which a position depends on the longest of the batch")
    if config._attn_implementation not in (PLAIN, SLOTS, "eager"):
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} cannot attend to slots of different lengths here: "
            "build the engine's copy of the model with 'sdpa' or 'eager'."
        )
    peft_model = as_peft_model(model)
    if peft_model is not None and peft_model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"peft_type={peft_model.active_peft_config.peft_type} puts virtual tokens into the cache, which this "
            "engine does not support: use LoRA or another adapter of weights."
        )


def _reject(config: PreTrainedConfig, why: str) -> NoReturn:
    raise ValueError(
        f"The transformers engine cannot sample from {config.model_type!r} models: this one {why}. Use "
        "engine='vllm', or a decoder-only attention model."
    )
