"""Which way whole weights take to vLLM servers: NCCL to their GPUs, or a file on disk.

Guarantees: a way that was asked for is taken, or an error; with "auto", a way that servers were started for and that
cannot be taken is said once.
"""

import importlib.util
import logging
from collections.abc import Sequence
from typing import Literal

import torch

from trl_a3po.engines.vllm.servers.nccl import NcclTransfer
from trl_a3po.engines.vllm.servers.server import ServerInfo

logger = logging.getLogger(__name__)

Setting = Literal["auto", "disk", "nccl"]


def weight_transfer(
    setting: Setting, trainer: torch.device, urls: Sequence[str], found: Sequence[ServerInfo]
) -> NcclTransfer | None:
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
            setting = "nccl"
        else:
            logger.warning(
                "The vLLM servers were started to take weights by %r, but %s: they go by disk. Set "
                "vllm_weight_transfer='disk' if that is meant.",
                backend,
                obstacle,
            )
    return NcclTransfer(trainer) if setting == "nccl" else None


def _obstacle(backend: str, trainer: torch.device, urls: Sequence[str], found: Sequence[ServerInfo]) -> str | None:
    """Why weights cannot go by a backend, in words that follow "but"; `None` if they can."""
    if other := [url for url, info in zip(urls, found, strict=True) if info.transfer != backend]:
        return f"{other[0]} was not"
    if backend != "nccl":
        return "this way is not known here"
    if trainer.type != "cuda":
        return f"the trainer is on {trainer}, and that takes them from a GPU"
    if not _has_vllm():
        return "vLLM is not installed in the trainer's environment, whose communicator that needs"
    return None


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None
