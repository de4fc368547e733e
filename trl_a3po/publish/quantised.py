"""Weights that bitsandbytes stores in 4 bits: an engine gets them dequantised, as training multiplies by them.

Guarantees: the trained model stays quantised; while an engine reads an update, at most two dequantised weights exist
in this process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight, get_bnb_param_type
from torch import nn
from transformers import PreTrainedConfig

from trl_a3po.publish.weight_sources import WeightSource


def prevent_repacking(model: nn.Module) -> None:
    """Prevent bitsandbytes from repacking weights for inference on a CPU, which would round their scales in place; the
    kernel for repacked weights gives no gradients.

    Raises:
        ValueError: a weight has been repacked already.
    """
    parameters: Iterator[tuple[str, Any]] = model.named_parameters()
    for name, weight in parameters:
        if is_quantised(weight) and weight.device.type == "cpu":
            if getattr(weight.quant_state, "packing_format_for_cpu", False):  # there once it has been repacked
                raise ValueError(
                    f"bitsandbytes has repacked {name!r} for inference, because the model ran in eval mode on the "
                    "CPU: load the model again, and build the trainer before the model generates."
                )
            layer: Any = owning_module(model, name)
            layer.support_avx512bf16_for_cpu = False


def owning_module(model: nn.Module, name: str) -> nn.Module:
    """The module that holds the parameter `name`."""
    return model.get_submodule(name.rpartition(".")[0])


def is_quantised(weight: torch.Tensor) -> bool:
    return isinstance(weight, nn.Parameter) and get_bnb_param_type(weight) == "4bit"


def dequantised_source(layer: Any) -> WeightSource:
    """The source of the dequantised weight, `(out_features, in_features)`, of a quantised linear layer."""
    dtype = layer.weight.quant_state.dtype
    template = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device="meta")
    return WeightSource(False, (layer.weight,), lambda: dequantize_module_weight(layer).detach(), template)


@contextmanager
def keep_trained_dtypes(model: nn.Module) -> Iterator[None]:
    """Restore the dtype of trained parameters that are loaded inside the context: PEFT loads every adapter in float32,
    but TRL trains the adapter of a quantised model in bfloat16."""
    before = {name: weight.dtype for name, weight in model.named_parameters() if weight.requires_grad}
    yield
    for name, weight in model.named_parameters():
        if weight.dtype != before.get(name, weight.dtype):
            weight.data = weight.data.to(before[name])


def drop_quantisation(config: PreTrainedConfig) -> None:
    """Turn `config` into the configuration of the dequantised model, in place."""
    for each in (config, config.get_text_config()):
        vars(each).pop("quantization_config", None)
