"""Adapters that are switched after the engine was built: another one is active, or none is, or it is merged.

Guarantees: the engine gets weights with which it samples as the policy does at that moment, or an error says why it
cannot; nothing is changed.
"""

from collections.abc import Mapping

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from trl_a3po.publish.weight_sources import WeightSource

MERGED_INSTEAD = "Set lora_sync='merged', or evaluate such weights outside of training."
# Fields of an adapter's configuration that say how it begins, not what it computes.
_OF_THE_BEGINNING = ("inference_mode", "init_lora_weights", "base_model_name_or_path", "revision", "auto_mapping")

AdapterLayer = BaseTunerLayer | AuxiliaryTrainingWrapper


def layers_without_adapter(model: PeftModel) -> dict[str, AdapterLayer]:
    """The layers, by path, whose forward leaves out the adapter: it is disabled, or merged into the weights."""
    return {
        path: module
        for path, module in model.named_modules()
        if (isinstance(module, BaseTunerLayer) and (module.disable_adapters or module.merged))
        or (isinstance(module, AuxiliaryTrainingWrapper) and module.disable_adapters)
    }


def sources_without_effect(
    path: str, layer: AdapterLayer, sources: Mapping[str, WeightSource], adapter: str
) -> dict[str, WeightSource]:
    """Sources for weights of the adapter of a layer with which the layer computes as without the adapter.

    Raises:
        ValueError: there are no such weights.
    """
    lora = isinstance(layer, LoraLayer) and adapter not in layer.lora_variant and not layer.lora_bias.get(adapter)
    if not lora:
        raise ValueError(
            f"The adapter of {path!r}, a {type(layer).__name__}, is disabled or merged, but the engine samples with "
            f"it. {MERGED_INSTEAD}"
        )
    factors = (f"{path}.lora_B.{adapter}.", f"{path}.lora_embedding_B.{adapter}.")
    return {name: _zeros(source) for name, source in sources.items() if f"{name}.".startswith(factors)}


def check_same_adapter(model: PeftModel, adapter: str, active: str) -> None:
    """Raise `ValueError` unless the weights of the adapter `active` can take the place of those of `adapter`."""
    built, now = (
        {name: value for name, value in model.peft_config[each].to_dict().items() if name not in _OF_THE_BEGINNING}
        for each in (adapter, active)
    )
    different = [name for name in built if built[name] != now.get(name)]
    if different:
        raise ValueError(
            f"The active adapter is {active!r}, whose {different[0]}={now.get(different[0])!r}, but the engine was "
            f"built with {adapter!r}, whose {different[0]}={built[different[0]]!r}. {MERGED_INSTEAD}"
        )


def _zeros(source: WeightSource) -> WeightSource:
    (weight,) = source.tensors
    empty = torch.empty(source.shape, dtype=weight.dtype, device="meta")
    return WeightSource(True, (weight,), lambda: torch.zeros_like(empty, device=weight.device), empty, "zeros")
