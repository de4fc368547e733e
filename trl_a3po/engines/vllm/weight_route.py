"""Which way whole weights take to vLLM servers: NCCL to another GPU, CUDA IPC on the same one, or a file on disk.

Guarantees: a way that was asked for is taken, or an error; with "auto", a way that servers were started for and that
cannot be taken is said once.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import Literal

import torch

from trl_a3po.engines.vllm.ipc import IpcTransfer, is_here
from trl_a3po.engines.vllm.nccl import NcclTransfer
from trl_a3po.engines.vllm.server import ServerInfo

logger = logging.getLogger(__name__)

Setting = Literal["auto", "disk", "nccl", "ipc"]
EXPANDABLE = "PYTORCH_ALLOC_CONF has expandable_segments:True, and not every Linux lets others open such memory"


def weight_transfer(
    setting: Setting, trainer: torch.device, urls: Sequence[str], found: Sequence[ServerInfo]
) -> NcclTransfer | IpcTransfer | None:
    """What takes whole weights to servers; `None`: the disk does.

    Args:
        found: what the servers of `urls` say of themselves.

    Raises:
        EngineError: the way that is set cannot be taken.
    """
    backend = next((info.transfer for info in found if info.transfer is not None), None)
    if setting == "auto" and backend is not None:
        obstacle = _obstacle(backend, trainer, urls, found)
        if obstacle is None:
            setting = "nccl" if backend == "nccl" else "ipc"  # `_obstacle` knows no other
        else:
            logger.warning(
                "The vLLM servers were started to take weights by %r, but %s: they go by disk. Set "
                "vllm_weight_transfer='disk' if that is meant.",
                backend,
                obstacle,
            )
    if setting == "nccl":
        return NcclTransfer(trainer)
    return IpcTransfer(trainer) if setting == "ipc" else None


def _obstacle(backend: str, trainer: torch.device, urls: Sequence[str], found: Sequence[ServerInfo]) -> str | None:
    """Why weights cannot go by a backend, in words that follow "but"; `None` if they can."""
    if other := [url for url, info in zip(urls, found, strict=True) if info.transfer != backend]:
        return f"{other[0]} was not"
    if backend not in ("nccl", "ipc"):
        return "this way is not known here"
    if trainer.type != "cuda":
        return f"the trainer is on {trainer}, and that takes them from a GPU"
    if backend == "nccl" and not _has_vllm():
        return "vLLM is not installed in the trainer's environment, whose communicator that needs"
    if backend == "ipc" and _expandable_segments():
        return EXPANDABLE
    if backend == "ipc" and not all(info.reads_handles for info in found):
        return "reading its handles needs VLLM_ALLOW_INSECURE_SERIALIZATION=1 there"
    if backend == "ipc" and (elsewhere := [url for url in urls if not is_here(url)]):
        return f"{elsewhere[0]} is on another machine than the trainer"
    return None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _expandable_segments() -> bool:
    settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:true" in setting.lower() for setting in settings)


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None
