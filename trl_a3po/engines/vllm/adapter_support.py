"""Which adapters vLLM can serve."""

import re
from collections.abc import Mapping

from peft import LoraConfig

_HEADS = re.compile(r"(^|\.)(lm_head|embed_tokens|wte|embed_in|embed_out)(\.|$)")
_IMAGES = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|connector|multi_modal_projector|embed_vision|vision_embedder)(\.|$)"
)

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def rank_option(rank: int) -> int:
    """What `max_lora_rank` has to be for adapters of this rank: vLLM knows some sizes, of which it is the next one."""
    return next((known for known in _RANKS if known >= rank), rank)


def adapter_obstacle(peft_config: object, tensor_names: Mapping[str, object] | set[str]) -> str | None:
    """Why vLLM cannot serve an adapter, in words that follow "because"; `None` if it can.

    Args:
        tensor_names: names of the trained tensors.
    """
    if type(peft_config) is not LoraConfig:
        return f"it is a {type(peft_config).__name__}, and vLLM serves LoRA alone"
    if peft_config.r > _RANKS[-1]:
        return f"its rank is {peft_config.r}, and vLLM serves ranks up to {_RANKS[-1]}"
    for name, words in (
        ("use_dora", "it is a DoRA adapter"),
        ("modules_to_save", "modules_to_save trains whole modules beside it"),
        ("trainable_token_indices", "trainable_token_indices trains embeddings beside it"),
        ("rank_pattern", "rank_pattern gives its layers different ranks"),
        ("alpha_pattern", "alpha_pattern gives its layers different scales"),
        ("lora_bias", "lora_bias trains biases"),
        ("target_parameters", "target_parameters adapts parameters outside of linear layers"),
        ("fan_in_fan_out", "fan_in_fan_out stores its layers transposed"),
    ):
        if getattr(peft_config, name, None):
            return f"{words}, which vLLM does not serve"
    if peft_config.bias != "none":
        return f"bias={peft_config.bias!r} trains biases, which vLLM does not serve"
    trained = {name for name in tensor_names if ".lora_" in name}
    if heads := sorted(name for name in trained if _HEADS.search(name.partition(".lora_")[0])):
        return f"it adapts {heads[0].partition('.lora_')[0]!r}, and vLLM serves no adapters of embeddings and heads"
    if towers := sorted(name for name in trained if _IMAGES.search(name.partition(".lora_")[0])):
        return (
            f"it adapts {towers[0].partition('.lora_')[0]!r}, and vLLM serves adapters of a vision-language model's "
            "language part alone (name its layers in target_modules, such as r'.*language_model.*_proj')"
        )
    if beside := sorted(set(tensor_names) - trained):
        return f"{beside[0]!r} is trained beside it"
    return None
