"""Attention heads of a model, read from its configuration."""

from typing import Any


def head_dim(config: Any) -> int:
    """Features of one attention head."""
    config = config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def num_kv_heads(config: Any) -> int:
    """Heads of keys and values in a layer: fewer than query heads in a model with grouped-query attention."""
    config = config.get_text_config()
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def kv_values_per_token(config: Any) -> int:
    """Numbers in the KV cache for one token: its keys and values in every layer."""
    num_layers: int = config.get_text_config().num_hidden_layers
    return 2 * num_layers * num_kv_heads(config) * head_dim(config)
