"""The worker's process: `python -m trl_a3po.engines.transformers.worker SOCKET PARENT`, started by the engine alone.

Guarantees: messages are taken in order, between decode steps, so a request behind a `load` is sampled from those
weights or newer; a request that cannot be served fails alone; the process ends when its parent does; whatever kills
it is printed last.

Messages in: `setup`, `load`, `submit`, `cancel`, `score`. Messages out: `built`, `loaded`, `events`, `progress`,
`scored`.
"""

import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from trl_a3po.workers.channel import Channel
from trl_a3po.workers.process import parents_channel

HEARTBEAT = 0.5
"""Seconds between two `progress` messages, at most one decode step more."""


@dataclass(frozen=True)
class Setup:
    """What does not change while a worker lives."""

    spec: Any
    sampling: Any
    device: str
    threads: int | None
    decoder: dict[str, Any]


def main() -> None:
    channel = parents_channel()
    try:
        _serve(channel)
    except EOFError:
        code = 0  # the engine closed its side
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing to tidy up, and the teardown of a CUDA context takes seconds


def _serve(channel: Channel) -> None:
    # Imports of several seconds come after `parents_channel`.
    import torch

    from trl_a3po.engines.transformers.decoder import SlotDecoder
    from trl_a3po.engines.transformers.staging import attach
    from trl_a3po.models.replica import build_replica, load_update
    from trl_a3po.protocol.engine import GroupFailed
    from trl_a3po.protocol.weights import WeightUpdate

    def load(version: int, names: tuple[str, ...] | None) -> None:
        tensors = views if names is None else {name: views[name] for name in names}
        load_update(model, WeightUpdate(version, tensors, complete=names is None))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    _, payload, handle = channel.receive_one()
    setup: Setup = pickle.loads(payload)
    device = torch.device(setup.device)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    model = build_replica(setup.spec, device)
    views = attach(handle)
    channel.send(("built",))

    _, version, _ = channel.receive_one()
    load(version, None)
    decoder = SlotDecoder(model, setup.sampling, version=version, device=device, **setup.decoder)
    channel.send(("loaded", version))

    busy_seconds = 0.0
    reported = time.monotonic()
    while True:
        events: list = []
        for message in channel.receive() if channel.poll(0.0 if not decoder.idle else HEARTBEAT) else ():
            match message:
                case ("submit", requests):
                    for request in requests:
                        try:
                            decoder.submit(request)
                        except ValueError as error:
                            events.append(GroupFailed(request.request_id, str(error)))
                case ("cancel", request_ids):
                    decoder.cancel(request_ids)
                case ("score", key, prompt_ids, completion_ids):
                    try:
                        answer = decoder.score(prompt_ids, completion_ids)
                    except ValueError as error:
                        answer = str(error)
                    channel.send(("scored", key, answer, decoder.version))
                case ("load", version, names):
                    load(version, names)
                    decoder.set_version(version)
                    channel.send(("loaded", version))
        if not decoder.idle:
            began = time.monotonic()
            events += decoder.step()
            busy_seconds += time.monotonic() - began
        beat = time.monotonic() - reported >= HEARTBEAT
        if events or beat:
            # Events do not put the next beat off: right after them the slots may happen to be empty every time.
            reported = time.monotonic() if beat else reported
            channel.send(("progress", decoder.tokens, busy_seconds, decoder.active_rollouts, decoder.waiting_requests))
        if events:
            channel.send(("events", events))
        channel.drain()


if __name__ == "__main__":
    main()
