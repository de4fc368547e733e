"""Separate ZeRO-3 traces for forwards without gradients.

DeepSpeed prefetches and frees weights in the order in which it has seen the modules called, its trace. The trace of a
forward alone frees every weight before a backward; DeepSpeed keeps it for the rest of the run, and would then fetch
each weight of each backward only when it is needed. A forward with the adapter off invalidates the trace.

Guarantees: forwards without gradients have their own traces, one for each choice of adapters, so that training's
forward and backward keep theirs; without ZeRO-3 nothing changes.
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
        """Inside, a forward of `model` uses the trace that belongs to it."""
        offload = None if torch.is_grad_enabled() else self._offload(model)
        if offload is None:
            yield
            return
        training = offload.param_coordinator
        kind = _adapters(model)
        known_uses, coordinator = self._without_gradients.get(kind, (None, None))
        if known_uses != (uses := _num_external_uses(offload.module)):
            coordinator = _copy_without_trace(training)
            self._without_gradients[kind] = uses, coordinator
        offload.param_coordinator = coordinator
        try:
            yield
        finally:
            offload.param_coordinator = training

    def _offload(self, model: torch.nn.Module) -> Any | None:
        """What fetches the weights of `model`; `None` unless DeepSpeed trains it with partitioned weights."""
        wrapped = self._accelerator.deepspeed_engine_wrapped if self._uses_deepspeed() else None
        if wrapped is None or wrapped.engine.module is not self._accelerator.unwrap_model(model):
            return None
        return wrapped.engine.optimizer.parameter_offload if wrapped.engine.zero_optimization_stage() == 3 else None

    def _uses_deepspeed(self) -> bool:
        return self._accelerator.state.deepspeed_plugin is not None


def _adapters(model: torch.nn.Module) -> tuple[Hashable, ...]:
    """Whether the adapters are off, and which are active; empty for a model without adapters."""
    layer = next((module for module in model.modules() if isinstance(module, BaseTunerLayer)), None)
    return () if layer is None else (layer.disable_adapters, *layer.active_adapters)


def _num_external_uses(model: torch.nn.Module) -> int:
    """How many weights DeepSpeed has seen used outside of their own modules. It fetches a weight for those modules as
    well, so a trace from before it saw one of these uses is wrong."""
    modules: Iterator[Any] = model.modules()
    return sum(len(module._external_params) for module in modules)


def _copy_without_trace(coordinator: Any) -> Any:
    """A copy of `coordinator` for the same weights, with the same settings and no trace."""
    other = copy.copy(coordinator)
    if other.is_invalid_trace():
        other._clear_trace_structures()
    else:
        other._invalidate_trace()
    return other
