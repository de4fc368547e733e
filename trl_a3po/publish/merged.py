"""`lora_sync="merged"`: the policy as a plain model, with its LoRA adapter merged into the published weights.

Guarantees: the trained module is only read. A merged weight (`W + scale * B @ A`, or its DoRA form) is a new tensor,
so no rounding accumulates in the weights that are trained; an adapter that is disabled, or that is merged already, is
left out; while an engine reads an update, at most two merged weights
exist.
"""

from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Embedding, Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from trl_a3po.models.sharded import plain_class
from trl_a3po.models.unwrap import active_adapter, base_model
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate
from trl_a3po.publish.collect import plain_config
from trl_a3po.publish.weight_sources import WeightSource, local_update


class CannotMerge(ValueError):
    """An adapter that cannot be merged out of place. The message follows `lora_sync='merged'`."""


def merged_spec(model: PeftModel, dtype: torch.dtype) -> PolicySpec:
    """The plain base model. Its embeddings are untied where the adapter changes only one weight of a tied pair.

    Raises:
        ValueError: a layer whose adapter cannot be merged out of place.
    """
    base, sources = base_model(model), merged_sources(model)
    config, head = plain_config(base), base.get_output_embeddings()
    if config.tie_word_embeddings:  # of the whole model, as transformers ties them; not every text config says it
        path = next(path for path, module in base.named_modules() if module is head)
        if f"{_plain(path)}.weight" in sources:
            config.tie_word_embeddings = False
            config.get_text_config().tie_word_embeddings = False
    return PolicySpec(plain_class(base), config, dtype)


def merged_sources(model: PeftModel) -> dict[str, WeightSource]:
    """The sources of the weights of the merged model, by their names in the plain base model. Merged weights are new
    tensors, the others live views; a pair that is still tied appears once."""
    adapter = active_adapter(model)
    sources: dict[str, WeightSource] = {}
    seen: set[int] = set()
    for name, tensor, source in _walk(base_model(model), "", adapter):
        if id(tensor) not in seen:
            sources[name] = source
        if tensor is not None:
            seen.add(id(tensor))
    return sources


def collect_merged(model: PeftModel, version: int, *, complete: bool = True) -> WeightUpdate:
    """The merged weights of `model`.

    Args:
        complete: every parameter and persistent buffer; otherwise only those that training changes.
    """
    return local_update(merged_sources(model), version, complete=complete)


def _walk(module: nn.Module, path: str, adapter: str) -> Iterator[tuple[str, torch.Tensor | None, WeightSource]]:
    """For every weight under `module`: its name in the plain base model, its tensor unless it is merged, its
    source."""
    if isinstance(module, (Linear, Embedding)):
        yield from _walk_lora(module, path, adapter)
    elif isinstance(module, ModulesToSaveWrapper):
        trained = adapter in module.modules_to_save and not module.disable_adapters
        yield from _walk(module.modules_to_save[adapter] if trained else module.original_module, path, adapter)
    elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        raise _cannot_merge(module, path)
    else:
        for name, tensor in _own(module):
            yield f"{path}{name}", tensor, WeightSource.of_tensor(tensor)
        for name, child in module.named_children():
            yield from _walk(child, f"{path}{name}.", adapter)


def _walk_lora(
    layer: Linear | Embedding, path: str, adapter: str
) -> Iterator[tuple[str, torch.Tensor | None, WeightSource]]:
    adapted = adapter in layer.lora_A or adapter in layer.lora_embedding_A
    if adapted and layer.lora_bias[adapter] and layer.get_base_layer().bias is None:
        raise CannotMerge(
            f"cannot merge {path.rstrip('.')!r}: lora_bias=True trains a bias there, but the layer itself has no bias"
        )
    tensors = tuple(layer.parameters())
    made_of = "" if layer.disable_adapters or layer.merged else adapter
    for name, tensor in _own(layer.get_base_layer()):
        if adapted and name == "weight":
            yield (
                f"{path}{name}",
                None,
                WeightSource(True, (tensor, *tensors), lambda: _merged_weight(layer, adapter), tensor, made_of),
            )
        elif adapted and name == "bias" and layer.lora_bias[adapter]:
            yield (
                f"{path}{name}",
                None,
                WeightSource(True, (tensor, *tensors), lambda: _merged_bias(layer, adapter), tensor, made_of),
            )
        else:
            yield f"{path}{name}", tensor, WeightSource.of_tensor(tensor)


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


@torch.no_grad()
def _merged_weight(layer: Linear | Embedding, adapter: str) -> torch.Tensor:
    base: Any = layer.get_base_layer()
    weight: torch.Tensor = base.weight.detach()
    if layer.disable_adapters or layer.merged:
        return weight
    if adapter in layer.lora_variant:
        merged: torch.Tensor = layer.lora_variant[adapter].merge_safe(layer, adapter, weight.clone())
        return merged.detach()
    delta: torch.Tensor = layer.get_delta_weight(adapter)
    return weight + delta.to(weight.dtype)


@torch.no_grad()
def _merged_bias(layer: Any, adapter: str) -> torch.Tensor:
    base: torch.Tensor = layer.get_base_layer().bias.detach()
    if layer.disable_adapters or layer.merged:
        return base
    delta: torch.Tensor = layer.lora_B[adapter].bias.detach() * layer.scaling[adapter]
    return base + delta


def _plain(path: str) -> str:
    """The path of an adapted module in the plain base model."""
    return ".".join(part for part in path.split(".") if part not in ("base_layer", "original_module"))


def _cannot_merge(module: nn.Module, path: str) -> CannotMerge:
    return CannotMerge(
        f"cannot merge {path.rstrip('.')!r}, a {type(module).__name__}: only LoRA and DoRA on linear and embedding "
        "layers, and modules_to_save, can be merged"
    )
