"""The worker process of the transformers engine, which starts it as
`python -m trl_a3po.engines.transformers.worker SOCKET PARENT`.

Guarantees, beside those of `worker_loop.py`: nothing is decoded before the first weights are loaded.
"""

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl_a3po.engines.worker_loop import Load, run_worker
from trl_a3po.workers.channel import Channel

if TYPE_CHECKING:  # these imports take several seconds, and the channel to the parent comes first
    from trl_a3po.engines.transformers.decoder import SlotDecoder


@dataclass(frozen=True)
class Setup:
    """What does not change while a worker lives."""

    spec: Any
    sampling: Any
    device: str
    threads: int | None
    decoder: dict[str, Any]


def _set_up(channel: Channel) -> "tuple[Load, SlotDecoder]":
    """Build the replica, then load its first weights."""
    import torch

    from trl_a3po.engines.staging import attach, usable_in_place
    from trl_a3po.engines.transformers.decoder import SlotDecoder
    from trl_a3po.models.replica import build_replica, load_update
    from trl_a3po.protocol.weights import WeightUpdate

    _, payload, handle = channel.receive_one()
    setup: Setup = pickle.loads(payload)
    device = torch.device(setup.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton's kernels and new events go to the current device
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    views = attach(handle)
    model = build_replica(setup.spec, device, usable_in_place(handle, views, device))
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


if __name__ == "__main__":
    run_worker(_set_up)
