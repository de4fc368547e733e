"""What the weights of a policy are, in a few numbers: a publish is decided by the weights, not by the step's number.

Guarantees: weights are only read. A weight that is written to in place, or replaced, gets another fingerprint. Torch
does not count what is written through `.data`: such a write is noticed if it changes one of about `SAMPLES` elements
that are spread over the weight. Of a weight that is spread over processes, the part of this process counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trl_a3po.models.sharded import local_part
from trl_a3po.publish.weight_sources import WeightSource

SAMPLES = 1024  # elements of each tensor that are read
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of an element


@dataclass(frozen=True)
class Fingerprint:
    """
    Args:
        places: for each weight, where its tensors lie, and how often torch has written to them.
        values: for each weight, what it is made of, and a number for each of its tensors, made of sampled elements.
    """

    places: dict[str, tuple[tuple[int, ...], ...]]
    values: dict[str, tuple[object, ...]]

    def changed(self, before: "Fingerprint") -> set[str]:
        """Names of the weights that differ from `before`, or may differ."""
        return {
            name
            for name in self.values
            if self.values[name] != before.values.get(name) or self.places[name] != before.places.get(name)
        }


@torch.no_grad()
def fingerprint(sources: Mapping[str, WeightSource]) -> Fingerprint:
    """The fingerprint of the weights of `sources`."""
    tensors = {name: [local_part(tensor) for tensor in source.tensors] for name, source in sources.items()}
    sampled = iter(_sampled([tensor for group in tensors.values() for tensor in group]))
    values = {name: (sources[name].made_of, *(next(sampled) for _ in group)) for name, group in tensors.items()}
    places = {name: tuple(map(_place, source.tensors, tensors[name])) for name, source in sources.items()}
    return Fingerprint(places, values)


def _place(whole: torch.Tensor, local: torch.Tensor) -> tuple[int, ...]:
    """Where a tensor lies. A weight that is spread may move without a change, so that only its values count."""
    return () if local is not whole else (local.data_ptr(), local._version)


def _sampled(tensors: list[torch.Tensor]) -> list[int]:
    """A number for each tensor, made of the bits of its sampled elements and of their order."""
    numbers = [_number(tensor) for tensor in tensors]
    devices = dict.fromkeys(number.device for number in numbers)
    together = {  # one transfer for each device
        device: iter(torch.stack([number for number in numbers if number.device == device]).tolist())
        for device in devices
    }
    return [next(together[number.device]) for number in numbers]


def _number(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    # An odd step, so that the elements do not all belong to the same columns.
    elements = flat[:: max(1, flat.numel() // SAMPLES) | 1]
    bits = elements.view(_BITS[elements.element_size()]).to(torch.int64)
    return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()
