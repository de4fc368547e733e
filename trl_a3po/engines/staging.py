"""The memory that carries weights from the trainer to the worker: one buffer, written by one, read by the other, and
the frozen weights of the trainer.

On a GPU the buffer lies on the device where there is room for it beside the replica, else on the host. A frozen weight
that the trainer has on the device of the replica, in its dtype, is not copied: the worker reads the trainer's own. Of
every other frozen weight there is one copy, in the buffer, which the replica uses where it is if it is on its device.

Guarantees: every weight has a place, which keeps what was written last, so a worker that starts late loads all of them
from there; nothing touches a disk, and nothing is left behind, however either process ends: on the host it is
anonymous memory that lives as long as a process has it open, on a GPU an allocation of the trainer's.

Whoever writes must know that nobody reads: the engine sees to that. Frozen weights are the exception: the worker reads
them all the time, so that one that changes nevertheless is read before it is published.
"""

import logging
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch.multiprocessing.reductions import reduce_tensor

from trl_a3po.engines.arrival import Arrival
from trl_a3po.protocol.weights import GatheredTensors, WeightUpdate
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


@dataclass(frozen=True, eq=False)
class Handle:
    """What `attach` needs in the worker; one handle for each worker.

    Args:
        opener, argument: of the buffer: its file descriptor or path, and size, or what rebuilds a tensor of another
            process.
        places: of the weights in the buffer.
        shared: of every other weight, what rebuilds the trainer's tensor.
        frozen: names of the weights that the replica may use where they are, if they are on its device.
    """

    opener: Any
    argument: Any
    places: tuple[Place, ...]
    shared: dict[str, Any]
    frozen: frozenset[str]

    @property
    def gpu_bytes(self) -> int:
        """Of the buffer, if it is on a GPU."""
        on_host = isinstance(self.opener, int | str) or not self.places
        return 0 if on_host else self.places[-1].start + self.places[-1].size


class Staging:
    """The trainer's side.

    Args:
        update: a complete update; it fixes names and shapes, and is written at once, which also touches every page.
        dtype: what floating-point weights are stored in, the replica's dtype.
        device: where the replica lives.
    """

    def __init__(self, update: WeightUpdate, dtype: torch.dtype, device: torch.device):
        self.shared = {
            name: update.specs[name].detach()
            for name in sorted(update.frozen)
            if _is_readable_elsewhere(update.specs[name], dtype, device)
        }
        self.frozen = update.frozen
        self.places = _places({name: spec for name, spec in update.specs.items() if name not in self.shared}, dtype)
        size = max(_ALIGNMENT, self.places[-1].start + self.places[-1].size if self.places else 0)
        self._device = device
        self._fd: int | None = None
        if device.type == "cuda" and _fits_twice(size, device):
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            self._fd = _anonymous_file(size)
            self._buffer = _map(self._fd, size)
        self._views = self.shared | _views(self._buffer, self.places)
        _, arrival = self.write(update)
        if arrival is not None:
            arrival.wait()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(view.shape) for name, view in self._views.items()}

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors the worker's process must inherit."""
        return () if self._fd is None else (self._fd,)

    def handle(self) -> Handle:
        opener, argument = (self._fd, self._buffer.numel()) if self._fd is not None else reduce_tensor(self._buffer)
        shared = {name: reduce_tensor(tensor) for name, tensor in self.shared.items()}
        return Handle(opener, argument, self.places, shared, self.frozen)

    @torch.no_grad()
    def write(self, update: WeightUpdate) -> tuple[int, Arrival | None]:
        """Copy the tensors in; the number of bytes, and what has to be waited for before they may be read: `None` if
        they have arrived when this returns. The tensors of the update may change as soon as this returns."""
        gpu = None if isinstance(update.tensors, GatheredTensors) else _common_gpu(update.tensors)
        if gpu is None:
            written = sum(self._write_now(name, tensor) for name, tensor in update.tensors.items())
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return written, None
        targets = [
            (self._views[name], tensor) for name, tensor in update.tensors.items() if not self._has(name, tensor)
        ]
        return sum(place.nbytes for place, _ in targets), Arrival.begin(targets, gpu)

    def _write_now(self, name: str, tensor: torch.Tensor) -> int:
        if self._has(name, tensor):
            return 0
        _copy(self._views[name], tensor)
        return self._views[name].nbytes

    def _has(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor is the one that the worker reads."""
        return name in self.shared and tensor.data_ptr() == self._views[name].data_ptr()

    def close(self) -> None:
        self._views = self.shared = {}
        self._buffer = torch.empty(0)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def attach(handle: Handle, device_index: int | None = None) -> dict[str, torch.Tensor]:
    """The worker's side: name -> the weight, in the buffer or in the trainer's memory.

    Args:
        device_index: what the worker calls the device of the buffer, if not what the trainer calls it.
    """
    if isinstance(handle.opener, int):
        buffer = _map(handle.opener, handle.argument)
    elif isinstance(handle.opener, str):
        with open(handle.opener, "r+b") as file:
            buffer = _map(file.fileno(), handle.argument)
    else:
        buffer = _open(handle.opener, handle.argument, device_index)
    shared = {name: _open(rebuild, arguments, device_index) for name, (rebuild, arguments) in handle.shared.items()}
    return shared | _views(buffer, handle.places)


def for_children(handle: Handle) -> Handle:
    """A handle for processes that this one starts and that inherit none of its files, while this one lives. On a CPU,
    Linux alone lets a process open what another one has open."""
    return (
        replace(handle, opener=f"/proc/{os.getpid()}/fd/{handle.opener}") if isinstance(handle.opener, int) else handle
    )


def usable_in_place(
    handle: Handle, views: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """The frozen weights among the `views` that `attach` has returned, if they are on the replica's `device`."""
    return {name: views[name] for name in sorted(handle.frozen) if views[name].device == device}


def _is_readable_elsewhere(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a worker can use the tensor as it is: it is on the replica's GPU, and in its dtype."""
    return device.type == "cuda" and tensor.device == device and tensor.dtype == dtype and tensor.is_contiguous()


def _open(rebuild: Callable[..., torch.Tensor], arguments: tuple[Any, ...], device_index: int | None) -> torch.Tensor:
    """A tensor of the trainer's, on a GPU."""
    if device_index is not None:
        arguments = (*arguments[:_DEVICE_INDEX], device_index, *arguments[_DEVICE_INDEX + 1 :])
    return rebuild(*arguments)


def _common_gpu(tensors: Mapping[str, torch.Tensor]) -> torch.device | None:
    """The GPU that all of the tensors are on, if there is one."""
    devices = {tensor.device for tensor in tensors.values()}
    only = devices.pop() if len(devices) == 1 else None
    return only if only is not None and only.type == "cuda" else None


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


def _places(specs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> tuple[Place, ...]:
    places, start = [], 0
    for name, spec in specs.items():
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
