"""Where each weight of an update comes from, known before anything is gathered or computed."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trl_a3po.models.sharded import full_shape
from trl_a3po.protocol.weights import GatheredTensors, WeightUpdate


@dataclass(frozen=True)
class WeightSource:
    """How one weight of an update is made from the tensors of the trained module.

    Args:
        trained: whether training changes the weight.
        tensors: tensors of the trained module that the weight is made of; the first one is the weight,
            unless there is a `template`.
        value: makes the weight, detached, from the values that the module has when this is called.
        template: a tensor with the shape and dtype of the weight and arbitrary values, where `value` makes a new
            tensor, which then exists only while an engine reads it; `None` where `value` returns a view.
        made_of: what decides the weight beside the values of `tensors`, such as the adapter that is active.
    """

    trained: bool
    tensors: tuple[torch.Tensor, ...]
    value: Callable[[], torch.Tensor]
    template: torch.Tensor | None = None
    made_of: str = ""

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, as a whole."""
        return full_shape(self.tensors[0] if self.template is None else self.template)  # packed, where quantised

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> "WeightSource":
        """The weight that is `tensor` itself. Training changes it if it is a parameter that requires a gradient, or a
        buffer."""
        trained = tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
        return cls(trained, (tensor,), tensor.detach)


def local_update(
    sources: Mapping[str, WeightSource],
    version: int,
    *,
    complete: bool,
    also: Collection[str] = (),
    evaluate: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lambda value: value(),
) -> WeightUpdate:
    """The update of a module whose tensors are all in this process: live views, and new tensors made one at a time.

    Args:
        complete: every weight; otherwise only those that training changes, and those of `also`.
        evaluate: calls the `value` of a source while the module holds the values that the update shall have.
    """
    chosen = {name: source for name, source in sources.items() if complete or source.trained or name in also}
    views = {name: source.value() for name, source in chosen.items() if source.template is None}
    templates = {name: source.template for name, source in chosen.items() if source.template is not None}
    frozen = frozenset(name for name, source in chosen.items() if complete and not source.trained)
    if not templates:
        return WeightUpdate(version, views, complete, frozen)

    @contextmanager
    def gather(names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        yield {name: views[name] if name in views else evaluate(chosen[name].value) for name in names}

    buckets = [list(views), *([name] for name in templates)]
    return WeightUpdate(version, GatheredTensors(views | templates, buckets, gather), complete, frozen)


def tensors_of(sources: Mapping[str, WeightSource]) -> list[torch.Tensor]:
    """The tensors of the trained module that the weights of `sources` are made of, each once."""
    return list({id(tensor): tensor for source in sources.values() for tensor in source.tensors}.values())
