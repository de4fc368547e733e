"""Which models and settings may use packed rows.

Guarantees: a model is packed only when its type is known to use attention over positions and nothing else; every
refusal is a sentence that says why and, where there is a remedy, what to set.
"""

from typing import Any

import torch
from peft import PeftModel

from trl_a3po.forward.attention import plain_implementation
from trl_a3po.models.sharded import plain_class
from trl_a3po.models.unwrap import base_model

# Attention by position, nothing learned by index, no state but keys and values, log-probs of dense layers only. The
# tests compare each type with separate sequences.
PACKABLE = ("cwm", "granite", "llama", "ministral", "mistral", "olmo2", "olmo3", "qwen2", "qwen3", "smollm3")


def packing_refusal(model: torch.nn.Module, *, compiled: bool = False) -> str | None:
    """Why the forwards of `model`, unwrapped, are padded; `None` if they can be packed."""
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return f"peft_type={model.active_peft_config.peft_type} adds virtual tokens to every row"
    base = base_model(model)
    config = base.config.get_text_config()
    if config.model_type not in PACKABLE:
        return f"model_type={config.model_type!r} is not among those tested packed ({', '.join(PACKABLE)})"
    model_class = plain_class(base)
    if not model_class.__module__.startswith("transformers."):
        return (
            f"{model_class.__name__} is not a class of transformers, so its forward may differ from "
            f"{config.model_type}'s"
        )
    implementation = plain_implementation(config._attn_implementation)
    if implementation != "sdpa":
        return (
            f"attn_implementation={implementation!r} is kept: load the model with 'sdpa', which runs packed rows on "
            "torch's FlashAttention kernels where the GPU supports them"
        )
    if getattr(config, "attention_dropout", 0.0):
        return f"attention_dropout={config.attention_dropout} is not applied to packed rows: set it to 0"
    for rope in _rope_settings(config):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            return f"rope_type={rope['rope_type']!r} makes a position depend on the longest row of the batch"
    if compiled:
        return "torch_compile=True would recompile for every new shape of a packed row"
    return None


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]
