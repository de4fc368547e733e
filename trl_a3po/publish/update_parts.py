"""What an update consists of, before anything is gathered or computed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from trl_a3po.protocol.weights import GatheredTensors, WeightUpdate


@dataclass(frozen=True)
class Part:
    """One weight of an update.

    Args:
        changes: whether training changes it.
        sources: the trained module's tensors it is made of, the one whose shape and dtype it has first.
        value: makes it, detached, from the module as it is when it is called.
        like: a tensor of its shape and dtype, whose values mean nothing, if `value` makes a new tensor: it then exists
            only while an engine is at it.
    """

    changes: bool
    sources: tuple[torch.Tensor, ...]
    value: Callable[[], torch.Tensor]
    like: torch.Tensor | None = None

    @classmethod
    def as_it_is(cls, tensor: torch.Tensor) -> "Part":
        """A parameter, which changes if it requires a gradient, or a persistent buffer, which may always."""
        changes = tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
        return cls(changes, (tensor,), tensor.detach)


def whole_update(
    parts: Mapping[str, Part],
    version: int,
    *,
    complete: bool,
    within: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lambda value: value(),
) -> WeightUpdate:
    """The update of a module whose tensors are all in this process: live views, and weights made one at a time.

    Args:
        complete: every part; otherwise those that training changes.
        within: calls a part's `value` while the module is what the update is of.
    """
    wanted = {name: part for name, part in parts.items() if complete or part.changes}
    views = {name: part.value() for name, part in wanted.items() if part.like is None}
    made = {name: part.like for name, part in wanted.items() if part.like is not None}
    if not made:
        return WeightUpdate(version, views, complete)

    @contextmanager
    def gather(names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        yield {name: views[name] if name in views else within(wanted[name].value) for name in names}

    buckets = [list(views), *([name] for name in made)]
    return WeightUpdate(version, GatheredTensors(views | made, buckets, gather), complete)


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """A parameter's own shape, also while ZeRO-3 has it partitioned."""
    if is_deepspeed_zero3_enabled():
        from deepspeed.runtime.zero.partition_parameters import is_zero_param

        if is_zero_param(tensor):
            return torch.Size(tensor.ds_shape)
    return tensor.shape
