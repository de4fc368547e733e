"""Which layers FSDP2 gathers together: with a torch whose groups need more than TRL's forward gives them, and in a
model as it is sharded.

Guarantees: only how layers are grouped is changed; with torch 2.13 and newer, of an output layer alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.distributed import fsdp

COMPLETES_GROUPS = Version("2.13")


@contextmanager
def groups_complete(torch_version: str = torch.__version__) -> Iterator[None]:
    """Inside, accelerate shards a model in such a way that FSDP2 gathers every layer that a forward uses.

    Accelerate has FSDP2 shard the last norm and the output layer as one group, with the embeddings if they are tied:
    `fully_shard([norm, head])`. The group is gathered when one of them is called, and ready for a backward and for
    the next forward when each of them has been called. TRL's forward takes the weight of the output layer without
    calling it. From 2.13 on, torch completes such a group at the end of the model's forward. Before, these layers
    have to stay in the group of the model itself, which is gathered when its forward begins. Neither group is
    resharded between forward and backward, so this takes no more memory; but its gathering does not overlap with the
    layers before.

    An output layer for which accelerate finds no norm would be a group alone, which nothing gathers but TRL, with a
    backward that drops the other processes' part of the gradient, and in host memory, if that is where its weight is.
    It stays in the group of the model too, if it is trained or offloaded.
    """
    fully_shard = fsdp.fully_shard
    completes = Version(torch_version) >= COMPLETES_GROUPS

    def without_incomplete_groups(module: nn.Module | list[nn.Module], **options: Any) -> Any:
        offloads = isinstance(options.get("offload_policy"), fsdp.CPUOffloadPolicy)
        if isinstance(module, list) and _stays_with_model(module, completes=completes, offloads=offloads):
            return module
        return fully_shard(module, **options)

    fsdp.fully_shard = without_incomplete_groups  # which accelerate imports when it shards
    try:
        yield
    finally:
        fsdp.fully_shard = fully_shard


def _stays_with_model(group: list[nn.Module], *, completes: bool, offloads: bool) -> bool:
    if len(group) > 1:
        return not completes
    return offloads or any(weight.requires_grad for weight in group[0].parameters())


def is_gathered_uncalled(model: nn.Module, layer: nn.Module) -> bool:
    """Whether a forward of `model`, as FSDP2 has sharded it, gathers the trained weights of `layer` without calling
    it: with a module that it is a part of, or with another module of its group."""
    inside = set(layer.modules())
    trained = {weight for weight in layer.parameters() if weight.requires_grad}
    groups = (_group_of(model, name) for name, weight in model.named_parameters() if weight in trained)
    return all(any(module not in inside for module in group) for group in groups)


def _group_of(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules any of which gathers the parameter `name` when it is called: all that `fully_shard` was given
    together with the innermost sharded module around the parameter."""
    around = name.split(".")[:-1]
    modules = (model.get_submodule(".".join(around[:depth])) for depth in range(len(around), -1, -1))
    state = next(module for module in modules if isinstance(module, fsdp.FSDPModule))._get_fsdp_state()
    sharded = (module for module in model.modules() if isinstance(module, fsdp.FSDPModule))
    return [module for module in sharded if module._get_fsdp_state() is state]
