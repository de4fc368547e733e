"""What an engine needs to rebuild the policy (`PolicySpec`) and to follow it (`WeightUpdate`).

Tensor names are those of the trained, unwrapped module (`PeftModel` included), so plain models, LoRA, DoRA and
`modules_to_save` travel the same way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PolicySpec:
    """How to build a replica of the policy without weights.

    Args:
        model_class: the `PreTrainedModel` class of the base model.
        config: its configuration (an instance, ours to keep).
        dtype: dtype of the replica's forward.
        peft_config: the adapter's configuration when the policy is a `PeftModel`, else `None`.
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
            `start` or `publish` returns. Each storage appears once (tied weights under their first name). An engine
            goes through `items()`, and is done with a tensor before it asks for the next one: where the weights are
            spread over processes, that is where they are gathered, a few at a time (`publish/partitioned.py`).
        complete: every parameter and persistent buffer is there (the first update); otherwise only those that
            training changes.
    """

    version: int
    tensors: Mapping[str, torch.Tensor]
    complete: bool = True

    @property
    def specs(self) -> Mapping[str, torch.Tensor]:
        """Name -> a tensor of that weight's shape and dtype, whose values mean nothing."""
        return self.tensors.specs if isinstance(self.tensors, GatheredTensors) else self.tensors


class GatheredTensors(Mapping[str, torch.Tensor]):
    """Tensors that exist only while `items()` is at them.

    Args:
        specs: name -> a tensor of its shape and dtype, on the device "meta".
        buckets: the names in order, those that exist at the same time together.
        gather: names -> a context in which these exist, as name -> tensor.
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

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor, one after the other; a tensor is gone once the next one is asked for."""
        for names in self._buckets:
            with self._gather(names) as tensors:
                for name in names:
                    yield name, tensors.pop(name)

    def renamed(self, names: Mapping[str, str]) -> "GatheredTensors":
        """Those of `names` (theirs here -> the new one), and no others."""
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
        raise TypeError(f"{name!r} exists only while items() is at it and cannot be had alone.")

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)
