"""Weights that DeepSpeed ZeRO-3 partitions: gathered in place, in every process, for as long as a context lasts.

Guarantees: the weights of a bucket are whole only inside its context; what the main process changes in a weight
reaches every partition.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from trl_a3po.publish.weight_sources import WeightSource, tensors_of


class ZeroShards:
    """As `partitioned.Shards`. The main process remembers the weights that are moved, in host memory.

    Args:
        is_main: whether this is the main process.
    """

    def __init__(self, is_main: bool):
        self._is_main = is_main
        self._before: dict[str, torch.Tensor] = {}

    def settle(self) -> None:
        pass  # DeepSpeed keeps the parameters that a module has, whole or not

    @contextmanager
    def gathered(self, sources: Mapping[str, WeightSource]) -> Iterator[dict[str, torch.Tensor]]:
        with _gathered(tensors_of(sources)):
            yield {name: source.value() for name, source in sources.items()} if self._is_main else {}

    def move(self, name: str, weight: torch.Tensor, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with _gathered([weight], changed_by_main=True):
            if self._is_main:
                self._before[name] = weight.detach().to("cpu", copy=True)
                weight.copy_(moved(weight.detach()))

    def restore(self, name: str, weight: torch.Tensor) -> None:
        with _gathered([weight], changed_by_main=True):
            if self._is_main:
                weight.copy_(self._before.pop(name))


def _gathered(tensors: Sequence[torch.Tensor], *, changed_by_main: bool = False) -> AbstractContextManager[Any]:
    """A context in which the partitioned ones among `tensors` are gathered. With `changed_by_main`, what the main
    process changes in them reaches every partition."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, is_zero_param

    partitioned = [tensor for tensor in tensors if is_zero_param(tensor)]
    context: AbstractContextManager[Any] = GatheredParameters(
        partitioned, modifier_rank=0 if changed_by_main else None, enabled=bool(partitioned)
    )
    return context
