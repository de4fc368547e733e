"""Engines under test, and what is asked of them."""

import time

import torch

from tests.engines.transformers.tiny_models import settings
from tests.workers.processes import TIMEOUT
from trl_a3po.engines.transformers.transformers_engine import TransformersEngine
from trl_a3po.protocol.engine import EngineEvent
from trl_a3po.publish.collect import collect_weights, policy_spec


def started(model, max_new_tokens: int, **changes) -> TransformersEngine:
    """An engine that samples from `model` as version 0."""
    engine = TransformersEngine(**{"slots": 4, "threads": 1, "start_timeout": TIMEOUT, **changes})
    engine.start(policy_spec(model, torch.float32), settings(max_new_tokens), collect_weights(model, 0, complete=True))
    return engine


def events_of(engine: TransformersEngine, request_ids) -> dict[int, EngineEvent]:
    """The one event of each request; fails on a second event, a stranger's event, or none in time."""
    awaited, events = set(request_ids), {}
    deadline = time.monotonic() + TIMEOUT
    while awaited - set(events):
        assert time.monotonic() < deadline, f"no event for {awaited - set(events)}: {engine.stats()}"
        for event in engine.wait(1.0):
            assert event.request_id in awaited and event.request_id not in events
            events[event.request_id] = event
    assert engine.wait(0.05) == []
    return events


@torch.no_grad()
def train(model, scale: float = 0.1) -> None:
    """A step of training large enough to matter."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.add_(scale * torch.randn_like(parameter))
