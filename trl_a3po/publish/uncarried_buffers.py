"""Buffers that no update carries, because a checkpoint leaves them out: an engine computes them from the
configuration.

Guarantees: nothing is changed; parameters of the replica that is compared with have no memory.
"""

import torch
from torch import nn

from trl_a3po.models.replica import empty_replica, named_weights
from trl_a3po.models.unwrap import base_model
from trl_a3po.protocol.weights import PolicySpec


def unlike_configuration(model: nn.Module, spec: PolicySpec) -> list[str]:
    """Names of the buffers of `model` that have other values than the configuration of `spec` gives them."""
    replica = empty_replica(spec)
    carried = named_weights(replica)
    own = dict(base_model(model).named_buffers()) | dict(model.named_buffers())
    return [
        name
        for name, buffer in replica.named_buffers()
        if name not in carried and name in own and not _equal(own[name], buffer)
    ]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if other.is_meta or one.shape != other.shape:
        return one.shape == other.shape
    return torch.allclose(one.detach().float().cpu(), other.float().cpu(), rtol=1e-3)
