"""What an engine needs to build a replica of the policy (`PolicySpec`) and to keep it up to date (`WeightUpdate`).

Tensor names are those of the trained, unwrapped module (`PeftModel` included), so plain models, LoRA, DoRA and
`modules_to_save` are sent in the same way.
"""

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PolicySpec:
    """How to build a replica of the policy, without its weights.

    Args:
        model_class: the `PreTrainedModel` class of the base model.
        config: the base model's configuration. The engine may keep this instance.
        dtype: dtype of the replica's forward pass.
        peft_config: the adapter's configuration if the policy is a `PeftModel`, else `None`.
        adapter_name: name of the trained adapter.
    """

    model_class: type
    config: Any
    dtype: torch.dtype
    peft_config: Any | None = None
    adapter_name: str = "default"


@dataclass(frozen=True)
class WeightUpdate:
    """The weights of one policy version.

    Args:
        version: the policy version.
        tensors: name -> detached tensor, possibly a live view of a trained parameter: an engine copies it before
            `start` or `publish` returns. Each storage appears once (tied weights appear under their first name). An
            engine iterates over `items()` and finishes with a tensor before it asks for the next one, because weights
            that are spread over processes are gathered during this iteration, a few at a time
            (`publish/partitioned.py`).
        complete: the update holds every parameter and persistent buffer, as the first update does. Otherwise it holds
            at least those that differ from the update before, and the engine keeps the others as they are.
        frozen: names of the weights of a complete update that training does not change. An engine on their device may
            go on reading them where they are in `specs`, unless they are on the device "meta" there, instead of
            keeping a copy. When one of them changes nevertheless, the next update holds it, in other memory.
    """

    version: int
    tensors: Mapping[str, torch.Tensor]
    complete: bool = True
    frozen: frozenset[str] = frozenset()

    @property
    def specs(self) -> Mapping[str, torch.Tensor]:
        """Name -> a tensor with the shape and dtype of that weight. Its values have no meaning, but for `frozen`."""
        return self.tensors.specs if isinstance(self.tensors, GatheredTensors) else self.tensors


class GatheredTensors(Mapping[str, torch.Tensor]):
    """Tensors that exist only while an iteration over `items()` has reached them.

    Args:
        specs: name -> a tensor of the same shape and dtype, on the device "meta".
        buckets: the names in order, in lists of those that are gathered together.
        gather: names -> a context manager in which these tensors exist, as name -> tensor.
    """

    def __init__(
        self,
        specs: Mapping[str, torch.Tensor],
        buckets: Sequence[Sequence[str]],
        gather: Callable[[Sequence[str]], AbstractContextManager[dict[str, torch.Tensor]]],
    ):
        self.specs = specs
        self._buckets = buckets
        self._gather = gather

    def items(self) -> ItemsView[str, torch.Tensor]:
        """The names and tensors, for one iteration. A tensor is gone once the next one is asked for."""
        return _GatheredItems(self)

    def iterate(self) -> Iterator[tuple[str, torch.Tensor]]:
        for names in self._buckets:
            with self._gather(names) as tensors:
                for name in names:
                    yield name, tensors.pop(name)

    def renamed(self, names: Mapping[str, str]) -> "GatheredTensors":
        """The tensors whose names are keys of `names`, under the names that these are mapped to."""
        before = {new: old for old, new in names.items()}

        @contextmanager
        def gather(new: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
            with self._gather([before[name] for name in new]) as tensors:
                yield {name: tensors.pop(before[name]) for name in new}

        buckets = [[names[name] for name in bucket if name in names] for bucket in self._buckets]
        return GatheredTensors(
            {names[name]: spec for name, spec in self.specs.items() if name in names},
            list(filter(None, buckets)),
            gather,
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.specs:
            raise KeyError(name)
        raise TypeError(f"{name!r} exists only during an iteration over items() and cannot be read on its own.")

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


class _GatheredItems(ItemsView[str, torch.Tensor]):
    """The `items()` of `GatheredTensors`."""

    def __init__(self, tensors: GatheredTensors):
        super().__init__(tensors)
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors.iterate()
