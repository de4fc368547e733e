"""The worker process of the transformers engine, which starts it as
`python -m trl_a3po.engines.transformers.worker SOCKET PARENT`.

Guarantees: messages are handled in order, between decode steps, so a request behind a `load` is sampled from those
weights or newer ones; a request that cannot be served fails alone; the process ends when its parent does; an error
that ends the process is the last thing it prints.

Messages in: `setup`, `load`, `submit`, `cancel`, `score`. Messages out: `built`, `loaded`, `events`, `progress`,
`scored`.
"""

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl_a3po.workers.channel import Channel
from trl_a3po.workers.process import parents_channel

if TYPE_CHECKING:  # these imports take several seconds, and `parents_channel` comes first
    from trl_a3po.engines.transformers.decoder import SlotDecoder
    from trl_a3po.protocol.engine import EngineEvent, GroupRequest

HEARTBEAT = 0.5
"""Seconds between two `progress` messages; a decode step may delay the next one."""

Load = Callable[[int, tuple[str, ...] | None], None]
"""Loads the weights of a version from the staging memory: those of the given names, or all of them."""


@dataclass(frozen=True)
class Setup:
    """What does not change while a worker lives."""

    spec: Any
    sampling: Any
    device: str
    threads: int | None
    decoder: dict[str, Any]


def main() -> None:
    channel, code = parents_channel(), 1
    try:
        load, decoder = _set_up(channel)
        _Server(channel, load, decoder).serve()
    except EOFError:
        code = 0  # the engine closed its side
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing to tidy up, and the teardown of a CUDA context takes seconds


def _set_up(channel: Channel) -> "tuple[Load, SlotDecoder]":
    """Build the replica, then load its first weights."""
    import torch

    from trl_a3po.engines.transformers.decoder import SlotDecoder
    from trl_a3po.engines.transformers.staging import attach
    from trl_a3po.models.replica import build_replica, load_update
    from trl_a3po.protocol.weights import WeightUpdate

    _, payload, handle = channel.receive_one()
    setup: Setup = pickle.loads(payload)
    device = torch.device(setup.device)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    model = build_replica(setup.spec, device)
    views = attach(handle)
    channel.send(("built",))

    def load(version: int, names: tuple[str, ...] | None) -> None:
        tensors = views if names is None else {name: views[name] for name in names}
        load_update(model, WeightUpdate(version, tensors, complete=names is None))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    _, version, _ = channel.receive_one()
    load(version, None)
    decoder = SlotDecoder(model, setup.sampling, version=version, device=device, **setup.decoder)
    channel.send(("loaded", version))
    return load, decoder


class _Server:
    """Handles messages and decodes, in turn."""

    def __init__(self, channel: Channel, load: Load, decoder: "SlotDecoder") -> None:
        self._channel = channel
        self._load = load
        self._decoder = decoder
        self._events: list[EngineEvent] = []
        self._busy_seconds = 0.0
        self._reported = time.monotonic()

    def serve(self) -> None:
        """Never returns. Raises `EOFError` when the engine has closed its side."""
        while True:
            if self._channel.poll(HEARTBEAT if self._decoder.idle else 0.0):
                for message in self._channel.receive():
                    self._handle(message)
            if not self._decoder.idle:
                began = time.monotonic()
                self._events += self._decoder.step()
                self._busy_seconds += time.monotonic() - began
            self._report()

    def _handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("submit", requests):
                for request in requests:
                    self._submit(request)
            case ("cancel", request_ids):
                self._decoder.cancel(request_ids)
            case ("score", key, prompt_ids, completion_ids):
                answer: list[float] | str
                try:
                    answer = self._decoder.score(prompt_ids, completion_ids)
                except ValueError as error:
                    answer = str(error)
                self._channel.send(("scored", key, answer, self._decoder.version))
            case ("load", version, names):
                self._load(version, names)
                self._decoder.set_version(version)
                self._channel.send(("loaded", version))

    def _submit(self, request: "GroupRequest") -> None:
        from trl_a3po.protocol.engine import GroupFailed

        try:
            self._decoder.submit(request)
        except ValueError as error:
            self._events.append(GroupFailed(request.request_id, str(error)))

    def _report(self) -> None:
        decoder = self._decoder
        beat = time.monotonic() - self._reported >= HEARTBEAT
        if self._events or beat:
            # Events do not put the next beat off: right after them the slots may happen to be empty every time.
            self._reported = time.monotonic() if beat else self._reported
            self._channel.send(
                ("progress", decoder.tokens, self._busy_seconds, decoder.active_rollouts, decoder.waiting_requests)
            )
        if self._events:
            self._channel.send(("events", self._events))
            self._events = []
        self._channel.drain()


if __name__ == "__main__":
    main()
