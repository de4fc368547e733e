"""The worker process of vLLM's engine, run as `trl_a3po.engines.vllm.process.vllm_worker` by an interpreter that has
vLLM, which need not be the trainer's.

Guarantees, beside those of `worker_loop.py`: the model is built from the first weights, without a file of them; of
this package, the worker imports only what does without TRL, transformers and peft.
"""

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_a3po.engines.vllm.weight_names import adapter_weights, base_weights
from trl_a3po.engines.worker_loop import Load, run_worker
from trl_a3po.workers.channel import Channel

if TYPE_CHECKING:  # importing torch takes seconds, and the channel to the parent comes first
    import torch

    from trl_a3po.engines.vllm.process.vllm_decoder import VLLMDecoder


@dataclass(frozen=True)
class Setup:
    """What does not change while a worker lives: plain values, because the interpreter that reads them may have other
    versions of every library.

    Args:
        options: of vLLM's `EngineArgs`.
        decoder: of `VLLMDecoder`.
        tied: names of weights that another name stands for.
        adapter: the configuration of the adapter; `None` without one.
        adapter_name: how the adapter's weights are called.
        folder: where the worker may write; the engine removes it.
        images: prompts may have images, and the model's folder holds its processor.
        nested_tower: as `base_weights` takes it.
    """

    sampling: Any
    options: dict[str, Any]
    decoder: dict[str, Any]
    tied: dict[str, str]
    adapter: dict[str, Any] | None
    adapter_name: str
    folder: str
    threads: int | None
    images: bool = False
    nested_tower: bool = False


def _set_up(channel: Channel) -> "tuple[Load, VLLMDecoder]":
    import torch

    from trl_a3po.engines.staging import attach
    from trl_a3po.engines.vllm.process.vllm_core import VLLMCore, check_version, sampling_params
    from trl_a3po.engines.vllm.process.vllm_decoder import VLLMDecoder

    _, payload, handle = channel.receive_one()
    setup: Setup = pickle.loads(payload)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    check_version(images=setup.images)  # imports vLLM, while the weights may still be being written
    views = attach(handle, device_index=0)  # the worker sees no other GPU than its own
    channel.send(("built",))
    _, version, _ = channel.receive_one()

    def weights() -> "Iterator[tuple[str, torch.Tensor]]":
        return base_weights(views, setup.tied, nested_tower=setup.nested_tower)

    core = VLLMCore(
        setup.options,
        weights,
        temperature=setup.sampling.temperature,
        adapters=setup.adapter is not None,
        images=setup.images,
    )

    def load(version: int, names: tuple[str, ...] | None) -> None:
        if setup.adapter is None:
            core.load_weights(weights())
        else:
            core.load_adapter(_write_adapter(setup, views))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    if setup.adapter is not None:
        load(version, None)
    decoder = VLLMDecoder(core, setup.sampling, sampling_params, version=version, **setup.decoder)
    channel.send(("loaded", version))
    return load, decoder


def _write_adapter(setup: Setup, views: "Mapping[str, torch.Tensor]") -> str:
    """Write the adapter as vLLM reads one. Returns its folder."""
    from safetensors.torch import save_file

    folder = Path(setup.folder) / "adapter"
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.cpu() for name, tensor in adapter_weights(views, setup.adapter_name)}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(setup.adapter))
    return str(folder)


if __name__ == "__main__":
    run_worker(_set_up)
