"""From the trained module to a `PolicySpec` and a `WeightUpdate`.

Guarantees: the module is only read, never copied, merged or moved (its forward may be patched, and a deep copy of a
patched module keeps running the weights of the original); tensors are live views; each storage appears once.

The module is unwrapped: a `PreTrainedModel`, or a `PeftModel` around one, as `GRPOTrainer` holds it.
"""

import copy

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import PreTrainedConfig, PreTrainedModel

from trl_a3po.forward.attention import plain_implementation
from trl_a3po.models.replica import named_weights
from trl_a3po.models.sharded import plain_class
from trl_a3po.models.unwrap import active_adapter, base_model
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate
from trl_a3po.publish.quantised import dequantised_source, drop_quantisation, is_quantised, owning_module
from trl_a3po.publish.switched_adapters import check_same_adapter, layers_without_adapter, sources_without_effect
from trl_a3po.publish.weight_sources import WeightSource, local_update


def policy_spec(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> PolicySpec:
    """What an engine needs to build a replica of `model` that runs in `dtype`.

    Raises:
        ValueError: the model is quantised, but not to 4 bits by bitsandbytes, or its adapter works on the prompt and
            not on the weights.
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
        return PolicySpec(plain_class(base), config, dtype)
    check_adapts_weights(model)
    adapter = active_adapter(model)
    peft_config = copy.deepcopy(model.peft_config[adapter])
    if isinstance(peft_config, LoraConfig):
        # Initialisations such as PiSSA compute on weights that the replica does not have yet.
        peft_config.init_lora_weights = False
    return PolicySpec(plain_class(base), config, dtype, peft_config, adapter)


def check_adapts_weights(model: PeftModel) -> None:
    """Raise `ValueError` for an adapter that works on the prompt: neither a replica nor merged weights would have
    it."""
    peft_config = model.peft_config[active_adapter(model)]
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}: adapters that add virtual tokens to the prompt are not "
            "supported by the engine. Use an adapter on the weights, such as LoraConfig."
        )


def plain_config(base: PreTrainedModel) -> PreTrainedConfig:
    """A copy of the configuration of `base`, without quantisation and without the attention implementation of the
    training forward."""
    config = copy.deepcopy(base.config)
    config._attn_implementation = plain_implementation(config._attn_implementation)
    drop_quantisation(config)
    return config


def policy_sources(model: PreTrainedModel | PeftModel, adapter: str | None = None) -> dict[str, WeightSource]:
    """The sources of every parameter and persistent buffer of `model`, by name; quantised weights are dequantised.
    Leaves out adapters other than the active one, such as a reference policy.

    Args:
        model: the policy.
        adapter: the adapter that the engine was built with. If another one is active now, its weights take the names
            of this one. Default: the active one.

    Raises:
        ValueError: the weights of an adapter cannot stand for the policy as it is now.
    """
    if not isinstance(model, PeftModel):
        return {name: _source(model, name, weight) for name, weight in named_weights(model).items()}
    active, others = active_adapter(model), _other_adapters(model)
    weights = {name: weight for name, weight in named_weights(model).items() if not _belongs(name, others)}
    sources = {name: _source(model, name, weight) for name, weight in weights.items()}
    for path, layer in layers_without_adapter(model).items():
        sources |= sources_without_effect(path, layer, sources, active)
    if adapter in (None, active):
        return sources
    check_same_adapter(model, str(adapter), active)
    return {_renamed(name, model, active, str(adapter)): source for name, source in sources.items()}


def collect_weights(model: PreTrainedModel | PeftModel, version: int, *, complete: bool) -> WeightUpdate:
    """The weights of `model` as policy version `version`, as live, detached views.

    Args:
        complete: every parameter and persistent buffer; otherwise only those that training changes, which are the
            parameters that require a gradient and the persistent buffers.
    """
    return local_update(policy_sources(model), version, complete=complete)


def _source(model: PreTrainedModel | PeftModel, name: str, weight: torch.Tensor) -> WeightSource:
    if is_quantised(weight):
        return dequantised_source(owning_module(model, name))
    return WeightSource.of_tensor(weight)


def _holders(model: PeftModel) -> set[str]:
    """Names of the attributes in which modules hold tensors of adapters."""
    return {
        holder
        for module in model.modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        for holder in (*module.adapter_layer_names, *module.other_param_names)
    }


def _other_adapters(model: PeftModel) -> set[str]:
    """Parts of names that mark a tensor of an inactive adapter: `.holder.adapter.` for each module that holds
    adapters."""
    others = set(model.peft_config) - {active_adapter(model)}
    return {f".{holder}.{adapter}." for holder in _holders(model) for adapter in others}


def _renamed(name: str, model: PeftModel, active: str, adapter: str) -> str:
    """The name of a tensor of the adapter `active` as a tensor of `adapter`."""
    for holder in _holders(model):
        name = f"{name}.".replace(f".{holder}.{active}.", f".{holder}.{adapter}.")[:-1]
    return name


def _belongs(name: str, markers: set[str]) -> bool:
    return any(marker in f"{name}." for marker in markers)
