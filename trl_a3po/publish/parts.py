"""What an update consists of, before anything is gathered or computed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from trl_a3po.publish.policy import GatheredTensors, WeightUpdate


@dataclass(frozen=True)
class Part:
    """One weight of an update.

    Args:
        changes: whether training changes it.
        sources: the trained module's tensors it is made of, the one whose shape and dtype it has first.
        value: makes it, detached, from the sources as they are when it is called.
        stored_otherwise: a tensor of its shape and dtype, whose values mean nothing, where its source has others (a
            quantised weight). Such a weight does not change, and exists only while an engine is at it.
    """

    changes: bool
    sources: tuple[torch.Tensor, ...]
    value: Callable[[], torch.Tensor]
    stored_otherwise: torch.Tensor | None = None

    @classmethod
    def as_it_is(cls, tensor: torch.Tensor) -> "Part":
        """A parameter, which changes if it requires a gradient, or a persistent buffer, which may always."""
        changes = tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
        return cls(changes, (tensor,), tensor.detach)


def whole_update(parts: Mapping[str, Part], version: int, *, complete: bool) -> WeightUpdate:
    """The update of a module whose tensors are all in this process: live views, or new tensors where computed.

    Args:
        complete: every part; otherwise those that training changes.
    """
    wanted = {name: part for name, part in parts.items() if complete or part.changes}
    tensors = {name: part.value() for name, part in wanted.items() if part.stored_otherwise is None}
    others = {name: part.stored_otherwise for name, part in wanted.items() if part.stored_otherwise is not None}
    if not others:
        return WeightUpdate(version, tensors, complete)

    @contextmanager
    def made(names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        yield {name: wanted[name].value() if name in others else tensors[name] for name in names}

    one_by_one = [list(tensors), *([name] for name in others)]
    return WeightUpdate(version, GatheredTensors(tensors | others, one_by_one, made), complete)


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """A parameter's own shape, also while ZeRO-3 has it partitioned."""
    if is_deepspeed_zero3_enabled():
        from deepspeed.runtime.zero.partition_parameters import is_zero_param

        if is_zero_param(tensor):
            return torch.Size(tensor.ds_shape)
    return tensor.shape
