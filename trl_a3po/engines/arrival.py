"""Weights on their way from the device that trains into the staging memory, while training goes on.

Guarantees: what arrives are the values that the weights had when `Arrival.begin` was called: tensors are copied on
their own device first, behind everything that the device has been asked to do, and sent from there on a stream of
their own. Where the device has not twice the room that the copies take, weights are sent at once, and training waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Target = tuple[torch.Tensor, torch.Tensor]
"""Where a weight goes to, and the weight."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """
    Args:
        copied: when the first copies, on the weights' own device, are done.
        sent_later: what is left to be sent then: of each weight its place, and the copy.
    """

    copied: torch.cuda.Event
    sent_later: list[Target]
    device: torch.device

    @classmethod
    def begin(cls, targets: Sequence[Target], device: torch.device) -> "Arrival":
        """Copy these weights, which are on `device`, a GPU."""
        later: list[Target] = []
        away = sum(place.nbytes for place, _ in targets if place.device != device)
        has_room = away > 0 and _has_room(away, device)
        for place, weight in targets:
            if place.device != device and has_room:
                later.append((place, weight.to(place.dtype, copy=True)))
            else:
                place.copy_(weight, non_blocking=place.device == device)
        with torch.cuda.device(device):
            copied = torch.cuda.Event()
            copied.record()
        return cls(copied, later, device)

    @torch.no_grad()
    def wait(self) -> None:
        """Send what is left, and return when everything has arrived. From any thread."""
        self.copied.synchronize()
        if not self.sent_later:
            return
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for place, copy in self.sent_later:
                    place.copy_(copy, non_blocking=True)
            stream.synchronize()
        self.sent_later.clear()


def _has_room(size: int, device: torch.device) -> bool:
    """Whether the device has room for a copy and as much again, counting what torch holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused // 2 > 2 * size
