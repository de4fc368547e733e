"""Weights that FSDP2 shards: each a `DTensor`, of which every process holds some rows.

Guarantees: a gathered weight is a new tensor, which the main process alone keeps; the other processes hold one whole
weight at a time, while it is gathered. The sharded weights stay in the module, and are only read, except by `move`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trl_a3po.models.sharded import local_part
from trl_a3po.publish.weight_sources import WeightSource, tensors_of


class FsdpShards:
    """As `partitioned.Shards`. Every process remembers its own part of the weights that are moved, in host memory.

    Args:
        model: the trained module, to which `fully_shard` was applied.
        is_main: whether this is the main process.
    """

    def __init__(self, model: nn.Module, is_main: bool):
        self._model = model
        self._is_main = is_main
        self._before: dict[str, torch.Tensor] = {}

    def settle(self) -> None:
        # A forward without a backward leaves the weights of the root and of the output layer whole, and cast to the
        # dtype of the forward. FSDP puts the shards back before it reads a state dict; `FSDPModule.reshard` does not
        # for a module that was not called, such as an output layer that TRL's forward only takes the weight of.
        self._model.state_dict()

    @contextmanager
    @torch.no_grad()
    def gathered(self, sources: Mapping[str, WeightSource]) -> Iterator[dict[str, torch.Tensor]]:
        whole: dict[int, torch.Tensor] = {}
        for tensor in tensors_of(sources):
            if isinstance(tensor, DTensor):
                full = _whole(tensor)
                if self._is_main:
                    whole[id(tensor)] = full
        yield self._values(sources, whole) if self._is_main else {}

    @torch.no_grad()
    def move(self, name: str, weight: torch.Tensor, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
        local = local_part(weight)
        self._before[name] = local.to("cpu", copy=True)
        local.copy_(local_part(_spread_as(weight, moved(_whole(weight)))))

    @torch.no_grad()
    def restore(self, name: str, weight: torch.Tensor) -> None:
        local_part(weight).copy_(self._before.pop(name))

    def _values(
        self, sources: Mapping[str, WeightSource], whole: Mapping[int, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        values = {
            name: whole[id(source.tensors[0])]
            for name, source in sources.items()
            if source.template is None and id(source.tensors[0]) in whole
        }
        with self._holding(whole if len(values) < len(sources) else {}):
            return {name: values[name] if name in values else source.value() for name, source in sources.items()}

    @contextmanager
    def _holding(self, whole: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Inside, the module holds `whole`, by the ids of the weights that these replace."""
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in self._model.modules() if whole else ():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in whole:
                    replaced.append((module, name, parameter))
        for module, name, parameter in replaced:
            module._parameters[name] = nn.Parameter(whole[id(parameter)], requires_grad=False)
        try:
            yield
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter


def _whole(weight: torch.Tensor) -> torch.Tensor:
    """The whole of `weight`, on the device of the mesh, where offloading has put the parts elsewhere."""
    if not isinstance(weight, DTensor):
        return weight.detach()
    on_mesh = cast(DTensor, weight.detach().to(weight.device_mesh.device_type))
    return on_mesh.full_tensor()


def _spread_as(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values`, which every process has, spread as `weight` is."""
    if not isinstance(weight, DTensor):
        return values
    return distribute_tensor(values, weight.device_mesh, weight.placements, src_data_rank=None)
