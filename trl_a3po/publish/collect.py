"""The trained module -> `PolicySpec` and `WeightUpdate`.

Guarantees: the module is only read: never copied, merged or moved (its forward may be patched, and a deep copy of a
patched module keeps running the original's weights); tensors are live views; each storage appears once.

The module is the unwrapped one, a `PreTrainedModel` or a `PeftModel` around one, as `GRPOTrainer` holds it.
"""

import copy

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import PreTrainedConfig, PreTrainedModel

from trl_a3po.forward.attention import plain_implementation
from trl_a3po.models.replica import named_weights
from trl_a3po.models.unwrap import active_adapter, base_model
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate
from trl_a3po.publish.quantised import dequantised, drop_quantisation, is_quantised, owner
from trl_a3po.publish.update_parts import Part, whole_update


def policy_spec(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> PolicySpec:
    """What an engine needs to build a replica of `model` that runs in `dtype`.

    Raises:
        ValueError: the model is quantised otherwise than to bitsandbytes' 4 bits, or its adapter works on the prompt
            instead of the weights.
    """
    base = base_model(model)
    for name, parameter in base.named_parameters():
        if not (parameter.is_floating_point() or is_quantised(parameter)):
            raise ValueError(
                f"{name!r} is stored as {parameter.dtype}, which an engine cannot compute with as training does: "
                "quantise with BitsAndBytesConfig(load_in_4bit=True), or load the model in float32, bfloat16 or "
                "float16."
            )
    config = plain_config(base)
    if not isinstance(model, PeftModel):
        return PolicySpec(type(base), config, dtype)
    adapter = active_adapter(model)
    peft_config = copy.deepcopy(model.peft_config[adapter])
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}: adapters that add virtual tokens to the prompt are not "
            "supported by the engine. Use an adapter on the weights, such as LoraConfig."
        )
    if isinstance(peft_config, LoraConfig):
        # Initialisations such as PiSSA compute on weights that the replica does not have yet.
        peft_config.init_lora_weights = False
    return PolicySpec(type(base), config, dtype, peft_config, adapter)


def plain_config(base: PreTrainedModel) -> PreTrainedConfig:
    """A copy of a model's configuration without what the training forward set for itself."""
    config = copy.deepcopy(base.config)
    config._attn_implementation = plain_implementation(config._attn_implementation)
    drop_quantisation(config)
    return config


def policy_parts(model: PreTrainedModel | PeftModel) -> dict[str, Part]:
    """What an update of `model` consists of: every parameter and persistent buffer as it is, or dequantised. Adapters
    other than the active one (a reference policy) are left out."""
    others = _other_adapters(model)
    weights = {name: weight for name, weight in named_weights(model).items() if not _belongs(name, others)}
    return {
        name: dequantised(owner(model, name)) if is_quantised(weight) else Part.as_it_is(weight)
        for name, weight in weights.items()
    }


def collect_weights(model: PreTrainedModel | PeftModel, version: int, *, complete: bool) -> WeightUpdate:
    """The weights of `model` as policy version `version`, as live, detached views.

    Args:
        complete: every parameter and persistent buffer; otherwise those that training changes: parameters that
            require a gradient, and persistent buffers.
    """
    return whole_update(policy_parts(model), version, complete=complete)


def _other_adapters(model: PreTrainedModel | PeftModel) -> set[str]:
    """Name endings that mark a tensor of an inactive adapter: `holder.adapter` for each place adapters live in."""
    if not isinstance(model, PeftModel):
        return set()
    holders = {
        holder
        for module in model.modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        for holder in module.adapter_layer_names
    }
    others = set(model.peft_config) - {active_adapter(model)}
    return {f".{holder}.{adapter}." for holder in holders for adapter in others}


def _belongs(name: str, markers: set[str]) -> bool:
    return any(marker in f"{name}." for marker in markers)
