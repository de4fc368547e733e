"""Which layers FSDP2 gathers together, with a torch whose groups need more than TRL's forward gives them.

Guarantees: with torch 2.13 and newer nothing is changed; with an older one only how layers are grouped, not what is
computed.
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
    """
    if Version(torch_version) >= COMPLETES_GROUPS:
        yield
        return
    fully_shard = fsdp.fully_shard

    def without_groups(module: nn.Module | list[nn.Module], **options: Any) -> Any:
        if isinstance(module, list) and len(module) > 1:
            return module
        return fully_shard(module, **options)

    fsdp.fully_shard = without_groups  # which accelerate imports when it shards
    try:
        yield
    finally:
        fsdp.fully_shard = fully_shard
