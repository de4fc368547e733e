"""Weights that are spread over the processes, by DeepSpeed ZeRO-3 or by FSDP2.

Guarantees: no function here communicates with another process, and weights are only read.
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.utils import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.integrations import is_deepspeed_zero3_enabled


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a weight that is spread, and other tensors as they are. Of a weight that ZeRO-3
    partitions, a vector without the filling behind the last element, which can be anything. Call it under
    `torch.no_grad()`."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if is_deepspeed_zero3_enabled():
        from deepspeed.runtime.zero.partition_parameters import is_zero_param

        if is_zero_param(tensor):
            weight: Any = tensor  # with what DeepSpeed has added to it
            before = weight.ds_tensor.ds_numel * dist.get_rank(weight.ds_process_group)
            elements: torch.Tensor = weight.ds_tensor[: max(0, weight.ds_numel - before)]
            return elements
    return tensor


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of a weight as a whole, wherever its parts are."""
    if is_deepspeed_zero3_enabled():
        from deepspeed.runtime.zero.partition_parameters import is_zero_param

        if is_zero_param(tensor):
            return torch.Size(tensor.ds_shape)  # type: ignore[attr-defined]  # set by DeepSpeed
    return tensor.shape


def keep_output_dtypes(fsdp_plugin: Any | None) -> None:
    """Have models that are sharded from now on return log-probs in float32, as their head computes them. Under
    mixed precision, accelerate has FSDP2 round what a model returns to the dtype of the forward.

    Args:
        fsdp_plugin: accelerate's; `None` for a launch without FSDP.
    """
    if fsdp_plugin is not None and fsdp_plugin.mixed_precision_policy is not None:
        fsdp_plugin.mixed_precision_policy = replace(fsdp_plugin.mixed_precision_policy, output_dtype=None)


def load_in_every_process(fsdp_plugin: Any | None) -> None:
    """Have models that are loaded from now on, until `load_as_launched`, get their weights in every process. With
    `fsdp_cpu_ram_efficient_loading`, transformers 5.17 leaves zeros in all processes but one, which accelerate
    replaces when it shards the model. TRL shards its reference model without accelerate, zeros included.

    Args:
        fsdp_plugin: accelerate's; `None` for a launch without FSDP.
    """
    if fsdp_plugin is not None and fsdp_plugin.cpu_ram_efficient_loading:
        disable_fsdp_ram_efficient_loading()


def load_as_launched(fsdp_plugin: Any | None) -> None:
    """Undo `load_in_every_process`."""
    if fsdp_plugin is not None and fsdp_plugin.cpu_ram_efficient_loading:
        enable_fsdp_ram_efficient_loading()


def reshard(model: nn.Module) -> None:
    """Have FSDP2 spread again what a forward without gradients has left whole. PEFT changes `requires_grad` when it
    switches an adapter off and on for the reference policy, and must change that of the weights that are trained."""
    if isinstance(model, FSDPModule):
        model.reshard()


def plain_class(module: nn.Module) -> type[Any]:
    """The class that `module` was built from: `fully_shard` gives it a class of its own, which cannot be pickled."""
    classes = type(module).__mro__
    return cast(type[Any], classes[classes.index(FSDPModule) + 1] if FSDPModule in classes else classes[0])
