"""Weights that bitsandbytes stores in 4 bits, as an engine gets them: dequantised, as training multiplies by them.

Guarantees: what is trained stays quantised; while an engine goes through an update, one dequantised weight and the one
before it exist in this process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.utils.integrations import dequantize_module_weight, get_bnb_param_type
from torch import nn
from transformers import PreTrainedConfig

from trl_a3po.publish.update_parts import Part


def keep_trainable(model: nn.Module) -> None:
    """Keep bitsandbytes, on a CPU, from repacking weights for inference: that rounds their scales in place, and the
    kernel that reads them gives no gradients.

    Raises:
        ValueError: it has repacked one already.
    """
    for name, weight in model.named_parameters():
        if is_quantised(weight) and weight.device.type == "cpu":
            if getattr(weight.quant_state, "packing_format_for_cpu", False):  # there once it has been repacked
                raise ValueError(
                    f"{name!r} was repacked for inference by bitsandbytes, because the model ran in eval mode on the "
                    "CPU: load the model again, and build the trainer before it generates."
                )
            owner(model, name).support_avx512bf16_for_cpu = False


def owner(model: nn.Module, name: str) -> nn.Module:
    """The module whose parameter `name` is."""
    return model.get_submodule(name.rpartition(".")[0])


def is_quantised(weight: torch.Tensor) -> bool:
    return get_bnb_param_type(weight) == "4bit"


def dequantised(layer: nn.Linear) -> Part:
    """The weight of a quantised linear layer, `(out_features, in_features)`."""
    dtype = layer.weight.quant_state.dtype
    shaped = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device="meta")
    return Part(False, (layer.weight,), lambda: dequantize_module_weight(layer).detach(), shaped)


@contextmanager
def dtypes_kept(model: nn.Module) -> Iterator[None]:
    """Trained parameters that are loaded inside keep their dtype: PEFT loads an adapter in float32, also that of a
    quantised model, which TRL trains in bfloat16."""
    before = {name: weight.dtype for name, weight in model.named_parameters() if weight.requires_grad}
    yield
    for name, weight in model.named_parameters():
        if weight.dtype != before.get(name, weight.dtype):
            weight.data = weight.data.to(before[name])


def drop_quantisation(config: PreTrainedConfig) -> None:
    """Make `config` that of the dequantised model, in place."""
    for each in (config, config.get_text_config()):
        vars(each).pop("quantization_config", None)
