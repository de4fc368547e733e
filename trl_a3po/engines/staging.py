"""The memory that carries weights from the trainer to the worker: one buffer, written by one, read by the other.

On a GPU the buffer lies on the device where there is room for it beside the replica, else on the host.

Guarantees: the buffer always has a place for every weight and keeps the last ones written, so a worker that starts
late loads all of them from it; nothing touches a disk, and nothing is left behind, however either process ends: on
the host it is anonymous memory that lives as long as a process has it open, on a GPU an allocation of the trainer's.

Whoever writes must know that nobody reads: the engine sees to that.
"""

import logging
import mmap
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.multiprocessing.reductions import reduce_tensor

from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.workers.standard_files import above_standard_files

logger = logging.getLogger(__name__)

_ALIGNMENT = 256
_DEVICE_INDEX = 6  # among the arguments that `reduce_tensor` gives for a tensor on a GPU


@dataclass(frozen=True)
class Place:
    """Where one weight lies in the buffer, in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    size: int


class Staging:
    """The trainer's side.

    Args:
        update: a complete update; it fixes names and shapes, and is written at once, which also touches every page.
        dtype: what floating-point weights are stored in, the replica's dtype.
        device: where the replica lives.
    """

    def __init__(self, update: WeightUpdate, dtype: torch.dtype, device: torch.device):
        self.places = _places(update, dtype)
        size = max(_ALIGNMENT, self.places[-1].start + self.places[-1].size if self.places else 0)
        self._device = device
        self._fd: int | None = None
        if device.type == "cuda" and _fits_twice(size, device):
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            self._fd = _anonymous_file(size)
            self._buffer = _map(self._fd, size)
        self._views = _views(self._buffer, self.places)
        self.write(update)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {place.name: place.shape for place in self.places}

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors the worker's process must inherit."""
        return () if self._fd is None else (self._fd,)

    def handle(self) -> tuple[Any, ...]:
        """What `attach` needs in the worker; one handle for each worker."""
        source = (self._fd, self._buffer.numel()) if self._fd is not None else reduce_tensor(self._buffer)
        return (*source, self.places)

    @torch.no_grad()
    def write(self, update: WeightUpdate) -> int:
        """Copy the tensors in; the number of bytes written. They have arrived when this returns."""
        for name, tensor in update.tensors.items():
            _copy(self._views[name], tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return sum(self._views[name].nbytes for name in update.tensors)

    def close(self) -> None:
        self._views = {}
        self._buffer = torch.empty(0)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def attach(handle: tuple[Any, ...], device_index: int | None = None) -> dict[str, torch.Tensor]:
    """The worker's side: name -> view of the buffer.

    Args:
        device_index: what the worker calls the device of the buffer, if not what the trainer calls it.
    """
    opener, argument, places = handle
    if isinstance(opener, int):
        return _views(_map(opener, argument), places)
    if device_index is not None:
        argument = (*argument[:_DEVICE_INDEX], device_index, *argument[_DEVICE_INDEX + 1 :])
    return _views(opener(*argument), places)


def _fits_twice(size: int, device: torch.device) -> bool:
    """Whether the device holds the buffer, the replica of the same size, and something to decode with."""
    free, _ = torch.cuda.mem_get_info(device)
    fits = 2 * size + size // 4 < free
    if not fits:
        logger.info(
            "Weights of %.1f GiB reach the engine through the host: %s has %.1f GiB free, too little for two copies.",
            size / 2**30,
            device,
            free / 2**30,
        )
    return fits


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.device.type == target.device.type == "cpu" and source.dtype == target.dtype and source.is_contiguous():
        # One thread fills the memory bus, while torch's threads would wait for each other tensor by tensor whenever
        # the worker holds a core: 0.05 s against up to 1.7 s for 538 MB on two cores.
        numpy.copyto(_bytes(target), _bytes(source))
    else:
        target.copy_(source)


def _bytes(tensor: torch.Tensor) -> numpy.ndarray:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _places(update: WeightUpdate, dtype: torch.dtype) -> tuple[Place, ...]:
    places, start = [], 0
    for name, spec in update.specs.items():
        stored = dtype if spec.is_floating_point() else spec.dtype
        size = spec.numel() * stored.itemsize
        places.append(Place(name, tuple(spec.shape), stored, start, size))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return tuple(places)


def _views(buffer: torch.Tensor, places: tuple[Place, ...]) -> dict[str, torch.Tensor]:
    return {
        place.name: buffer[place.start : place.start + place.size].view(place.dtype).view(place.shape)
        for place in places
    }


def _anonymous_file(size: int) -> int:
    with above_standard_files():  # the engine's worker inherits it
        if sys.platform == "linux":
            fd = os.memfd_create("trl_a3po_weights")
        else:  # elsewhere the nearest thing is an open file without a name
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd


def _map(fd: int, size: int) -> torch.Tensor:
    # The tensor keeps the mapping alive; the mapping is unmapped with it.
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
