"""The names of a policy's weights, as a checkpoint of the base model and as a saved adapter have them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

Weight = TypeVar("Weight")

_NESTED_TOWERS = ("clip_vision_model", "siglip_vision_model")  # by `model_type`
_TOWER = re.compile(r"(^|\.)vision_tower\.(?!vision_model\.)")


def has_nested_tower(config: Any) -> bool:
    """Whether the weights of the vision tower are a level deeper in checkpoints, and in vLLM, than in the models of
    transformers since 5.0."""
    return getattr(getattr(config, "vision_config", None), "model_type", None) in _NESTED_TOWERS


def base_weights(
    weights: Mapping[str, Weight], tied: Mapping[str, str], *, nested_tower: bool = False
) -> Iterator[tuple[str, Weight]]:
    """The weights without those of an adapter, under the names of the plain model.

    Args:
        tied: name -> the name whose weight it shares, for weights that are to appear under both.
        nested_tower: as `has_nested_tower` says.
    """
    names: dict[str, list[str]] = {}
    for name, source in tied.items():
        names.setdefault(source, []).append(name)
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        for other in (plain, *names.get(plain, ())):
            yield _TOWER.sub(r"\1vision_tower.vision_model.", other) if nested_tower else other, weight


def adapter_weights(weights: Mapping[str, Weight], adapter_name: str) -> Iterator[tuple[str, Weight]]:
    """The weights of the adapter, under the names of a saved one."""
    for name, weight in weights.items():
        if ".lora_" in name:
            yield name.replace(f".{adapter_name}.", "."), weight
