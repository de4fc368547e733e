"""One decode step, as a plain function of tensors that stay where they are, and its CUDA graphs.

Guarantees: a step reads the slots' tensors and the cache, draws one token for each of the first rows, and leaves the
tokens where the next step reads them; it exchanges nothing with the host. So a captured step, which replays the
kernels of one step on the same memory, is that step; weights that are changed in place are read by the next replay.

A shape is captured when it is met for the second time. The number of shapes is bounded: rows are padded to one of
2 sizes for each power of two, and so are the positions that attention reads, where it does not find the end of each
sequence by itself.
"""

import logging
import weakref
from collections.abc import Callable

import torch

from trl_a3po.engines.transformers.cache import SlotCache
from trl_a3po.engines.transformers.forward import ModelForward
from trl_a3po.engines.transformers.sampling import Sampler
from trl_a3po.engines.transformers.slots import Slots

logger = logging.getLogger(__name__)

Step = Callable[[], torch.Tensor]
Capture = Callable[[Step], Step]
"""Returns what does again what the step did, on the same memory; the step itself may be traced but has no effect."""

# Attention reads a multiple of this many positions, so that shapes repeat from step to step.
_LENGTH_STEP = 32


class DecodeStep:
    """The step itself."""

    def __init__(self, forward: ModelForward, sampler: Sampler, cache: SlotCache, slots: Slots):
        self._forward = forward
        self._sampler = sampler
        self._cache = cache
        self._slots = slots

    def __call__(self, rows: int, length: int) -> torch.Tensor:
        """Tokens and log-probs, `(2, rows)` float64; attention reads `length` positions."""
        slots = self._slots
        tokens, places, ahead = slots.first_tokens(rows), slots.first_places(rows), slots.first_ahead(rows)
        logits = self._forward.decode(tokens, places, ahead, self._cache, length)
        too_early = self._sampler.too_early(slots.first_generated(rows))
        drawn = self._sampler.draw(logits, slots.first_noise(rows), too_early, slots.first_seen(rows))
        slots.take_first(drawn[0].long())
        return drawn


class DecodeSteps:
    """Runs `step` for the first rows of `cache`, captured where that is possible.

    Args:
        step: of so many rows, reading so many positions.
        cache: what the step reads; when it has to grow, everything captured is dropped.
        slots: the most rows.
        whole_capacity: asked before a step: whether it reads the whole capacity of the cache.
        capture: `None`: nothing is captured, and shapes are as small as the step needs.
    """

    def __init__(
        self,
        step: Callable[[int, int], torch.Tensor],
        cache: SlotCache,
        *,
        slots: int,
        whole_capacity: Callable[[], bool],
        capture: Capture | None,
    ):
        self._step = step
        self._cache = cache
        self._slots = slots
        self._whole_capacity = whole_capacity
        self._capture = capture
        self._capacity = 0
        self._met: set[tuple[int, int]] = set()
        self._captured: dict[tuple[int, int], Step] = {}

    @property
    def pads(self) -> bool:
        """Whether rows are padded, so that a few free slots between the active ones cost nothing."""
        return self._capture is not None

    def rows(self, needed: int) -> int:
        """Rows of a step over the first `needed` slots."""
        return min(_padded(needed), self._slots) if self.pads else needed

    def run(self, rows: int, length: int) -> torch.Tensor:
        """A step of `rows`, whose sequences have at most `length` tokens."""
        length = max(_LENGTH_STEP, _padded(length)) if self.pads else -(-length // _LENGTH_STEP) * _LENGTH_STEP
        self._cache.reserve(length)
        if self._cache.capacity != self._capacity:
            self._forget()
        shape = rows, self._cache.capacity if self._whole_capacity() else length
        if shape in self._captured:
            return self._captured[shape]()
        if self._capture is not None and shape in self._met:
            return self._first_replay(self._capture, shape)
        self._met.add(shape)
        return self._step(*shape)

    def _first_replay(self, capture: Capture, shape: tuple[int, int]) -> torch.Tensor:
        try:
            self._captured[shape] = capture(lambda: self._step(*shape))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            logger.warning(
                "Decoding is not captured as CUDA graphs, which costs speed: this model cannot be captured (%s).",
                reason,
            )
            self._capture = None
            self._forget()
            return self._step(*shape)
        return self._captured[shape]()

    def _forget(self) -> None:
        self._captured = {}
        self._met = set()
        self._capacity = self._cache.capacity


def cuda_graphs(device: torch.device) -> Capture:
    """Captures CUDA graphs that share their memory: they are replayed one after the other."""
    alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def capture(step: Step) -> Step:
        pool = next((graph.pool() for graph in alive), None)  # the memory goes with the last graph in it
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another one may train on the same device.
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            drawn = step()
        alive.add(graph)

        def replay() -> torch.Tensor:
            graph.replay()
            return drawn

        return replay

    return capture


def _padded(size: int) -> int:
    """The next power of two, or three quarters of it."""
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if size <= power * 3 // 4 else power
