"""The worker process of vLLM's engine, run as `trl_a3po.engines.vllm.process.vllm_worker` by an interpreter that has
vLLM, which need not be the trainer's.

Guarantees, beside those of `worker_loop.py`: the model is built from the first weights, without a file of them; of
this package, the worker imports only what does without TRL, transformers and peft.
"""

import os
import pickle
import subprocess
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from typing import TYPE_CHECKING, Any
from unittest import mock

from trl_a3po.engines.worker_loop import Load, run_worker
from trl_a3po.workers.channel import Channel

_FREE_AT_START = 0.97  # of a GPU's memory; processes that use it have taken the rest

if TYPE_CHECKING:  # importing torch takes seconds, and the channel to the parent comes first
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
        folder: of the model, where the worker may write; the engine removes it.
        images: prompts may have images, and the model's folder holds its processor.
        nested_tower: as `base_weights` takes it.
        interpreter: the setting that names the interpreter, for errors.
        ranks: processes that hold the model, each a part of it; the worker itself if it is one.
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
    ranks: int = 1
    interpreter: str = "vllm_python=None"


def _set_up(channel: Channel) -> "tuple[Load, VLLMDecoder]":
    import torch

    from trl_a3po.engines.staging import for_children
    from trl_a3po.engines.vllm.process.vllm_core import VLLMCore, check_version, sampling_params
    from trl_a3po.engines.vllm.process.vllm_decoder import VLLMDecoder

    _, payload, handle = channel.receive_one()
    setup: Setup = pickle.loads(payload)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    if setup.ranks > 1:
        _prepare_ranks(setup.folder)
        handle = for_children(handle)
    try:
        check_version(images=setup.images)  # imports vLLM, while the weights may still be being written
    except Exception as error:
        traceback.print_exc()
        channel.send(("unusable", _sentence(error, setup.interpreter)))
        raise
    channel.send(("built",))
    _, version, _ = channel.receive_one()
    adapters = setup.adapter is not None
    options = dict(setup.options)
    if handle.gpu_bytes:
        total = torch.cuda.get_device_properties(0).total_memory
        options["gpu_memory_utilization"] = share_beside(
            options["gpu_memory_utilization"], handle.gpu_bytes, total_bytes=total
        )
    core = VLLMCore(options, setup, handle, adapters=adapters, images=setup.images)

    def load(version: int, names: tuple[str, ...] | None) -> None:
        if adapters:
            core.load_adapter()
        else:
            core.load_weights()

    if adapters:
        load(version, None)
    decoder = VLLMDecoder(core, setup.sampling, sampling_params, version=version, **setup.decoder)
    channel.send(("loaded", version))
    return load, decoder


def _sentence(error: Exception, interpreter: str) -> str:
    from trl_a3po.engines.vllm.process.vllm_core import OtherVersion

    if isinstance(error, OtherVersion):
        return str(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"{interpreter} has a vLLM that cannot be imported ({what}): repair its environment, set vllm_python to an "
        "interpreter whose vLLM can be imported, or set vllm_server_urls to running servers."
    )


def share_beside(share: float, staged_bytes: int, *, total_bytes: int) -> float:
    """The share of a GPU's memory that vLLM takes: `share`, or less where the weights that are staged on the same GPU
    leave less. vLLM does not start unless its share is free."""
    return min(share, _FREE_AT_START - staged_bytes / total_bytes)


def _prepare_ranks(folder: str) -> None:
    """Have nothing left of what vLLM's processes find each other by, however they end: files go into `folder`, and the
    process that removes named shared memory when all others have ended is not killed with them."""
    tempfile.tempdir = os.environ["VLLM_RPC_BASE_PATH"] = folder

    def spawn(path: Any, arguments: Sequence[Any], files: Sequence[int]) -> int:
        null = subprocess.DEVNULL
        command = [path, *arguments[1:]]
        started = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, pass_fds=files, start_new_session=True
        )
        return started.pid

    with mock.patch.object(util, "spawnv_passfds", spawn):
        resource_tracker.ensure_running()


if __name__ == "__main__":
    run_worker(_set_up)
