"""Captured decode steps on a CPU: a tape replays the operations of a step on the same memory, as a CUDA graph does."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from trl_a3po.engines.transformers.decode_step import DecodeSteps
from trl_a3po.engines.transformers.decoder import SlotDecoder

READS_THE_DEVICE = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class Tape(TorchDispatchMode):
    """Records operations. As during the capture of a CUDA graph, none may bring a number to the host."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS_THE_DEVICE:
            raise RuntimeError(f"{func} is not permitted during capture")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self, result: torch.Tensor) -> torch.Tensor:
        """`result`, computed again from the memory that the operations read."""
        now: dict[int, torch.Tensor] = {}

        def current(value):
            return now.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, out in self.calls:
            again = func(*tree_map(current, args), **tree_map(current, kwargs))
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                now[id(old)] = new
        return now[id(result)]


def _tensors(out):
    return [value for value in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(value, torch.Tensor)]


class TapeCapture:
    """A `Capture` for `decoder`."""

    def __init__(self, decoder: SlotDecoder):
        self.captured = self.replays = 0
        self._slots = decoder._slots

    def __call__(self, step):
        slots = self._slots
        before = slots._token.clone(), None if slots._seen is None else slots._seen.clone()
        with Tape() as tape:
            result = step()
        slots._token.copy_(before[0])
        if slots._seen is not None:
            slots._seen.copy_(before[1])
        self.captured += 1

        def replay():
            self.replays += 1
            return tape.replay(result)

        return replay


def captured(decoder: SlotDecoder) -> TapeCapture:
    """Have `decoder`, which is on a CPU, decode as it would on a GPU."""
    capture = TapeCapture(decoder)
    decoder._steps = DecodeSteps(
        decoder._steps._step,
        decoder._cache,
        slots=len(decoder._slots),
        whole_capacity=decoder._steps._whole_capacity,
        capture=capture,
    )
    decoder._ahead = 1
    return capture
