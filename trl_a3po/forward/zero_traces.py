"""Forwards without gradients beside training's own, under ZeRO-3.

DeepSpeed fetches weights ahead in the order in which it has seen the modules called, its trace, and frees them by it.
A trace of a forward alone frees every weight before a backward; DeepSpeed remembers that for the life of the run, and
then fetches each weight of each backward by itself, when it is needed. A forward with the adapter off ends the trace.

Guarantees: what runs without gradients has traces of its own, one for each choice of adapters, so that training's
forward and backward keep theirs; without ZeRO-3 nothing happens.
"""

import copy
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from peft.tuners.tuners_utils import BaseTunerLayer


class ZeroTraces:
    """The traces of one trainer's policy.

    Args:
        accelerator: the trainer's.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._without_gradients: dict[Hashable, tuple[int, Any]] = {}

    @contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside, a forward of `model` uses the trace of its kind."""
        offload = None if torch.is_grad_enabled() else self._offload(model)
        if offload is None:
            yield
            return
        training = offload.param_coordinator
        kind = _adapters(model)
        known, coordinator = self._without_gradients.get(kind, (None, None))
        if known != (used := _used_elsewhere(offload.module)):
            coordinator = _without_a_trace(training)
            self._without_gradients[kind] = used, coordinator
        offload.param_coordinator = coordinator
        try:
            yield
        finally:
            offload.param_coordinator = training

    def _offload(self, model: torch.nn.Module) -> Any | None:
        """What fetches the weights of `model`, if that is the one DeepSpeed trains, partitioned."""
        wrapped = self._accelerator.deepspeed_engine_wrapped if self._uses_deepspeed() else None
        if wrapped is None or wrapped.engine.module is not self._accelerator.unwrap_model(model):
            return None
        return wrapped.engine.optimizer.parameter_offload if wrapped.engine.zero_optimization_stage() == 3 else None

    def _uses_deepspeed(self) -> bool:
        return self._accelerator.state.deepspeed_plugin is not None


def _adapters(model: torch.nn.Module) -> tuple[Hashable, ...]:
    """Whether the adapters are off, and which are active; nothing without adapters."""
    layer = next((module for module in model.modules() if isinstance(module, BaseTunerLayer)), None)
    return () if layer is None else (layer.disable_adapters, *layer.active_adapters)


def _used_elsewhere(model: torch.nn.Module) -> int:
    """How many weights DeepSpeed has seen used by other modules than their own, which it fetches for these as well:
    a trace from before it saw one is wrong."""
    return sum(len(module._external_params) for module in model.modules())


def _without_a_trace(coordinator: Any) -> Any:
    """Another coordinator of the same weights, with the same settings."""
    other = copy.copy(coordinator)
    if other.is_invalid_trace():
        other._clear_trace_structures()
    else:
        other._invalidate_trace()
    return other
