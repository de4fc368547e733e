"""Whole weights over CUDA IPC, from the trainer's GPU into a vLLM server on the same GPU, by vLLM's own endpoints.

Guarantees: nothing is written and nothing leaves the GPU; at most `BUCKET_BYTES` of copies beside the weights at a
time (or one tensor, if that is larger), and what the server has not let go of; tensors are gone through once, also
for several servers. The trainer's environment needs no vLLM.

What travels is a handle for each copy, pickled, which the server has to be allowed to read:
`VLLM_ALLOW_INSECURE_SERIALIZATION=1`. Torch keeps the memory of a copy until the process that opened it has closed it.

The wire format is that of vLLM 0.22 to 0.31; vLLM 0.22 took weights so on an H200.
"""

import base64
import ipaddress
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.multiprocessing.reductions import reduce_tensor

from trl_a3po.engines.vllm.every_server import on_every_server
from trl_a3po.engines.vllm.nccl import BUCKET_BYTES, BUCKET_TIMEOUT, Named, buckets
from trl_a3po.engines.vllm.pooled_server import PooledServer
from trl_a3po.errors import EngineError
from trl_a3po.protocol.weights import WeightUpdate


class IpcTransfer:
    """
    Args:
        device: the trainer's GPU.

    Raises:
        EngineError: the device is no GPU.
    """

    def __init__(self, device: torch.device):
        if device.type != "cuda":
            raise EngineError(
                f"vllm_weight_transfer='ipc' takes weights from a GPU, but the trainer is on {device}: set 'disk'."
            )
        self._device = device
        self._lives: dict[PooledServer, int] = {}  # the one in which a server was told that weights come this way

    hint = "It has to be on the trainer's GPU for CUDA IPC: set vllm_weight_transfer='disk' to go without."

    def send(
        self,
        members: Sequence[PooledServer],
        update: WeightUpdate,
        dtype: torch.dtype,
        lost: Callable[[PooledServer, str], None],
    ) -> tuple[list[PooledServer], int]:
        """Load `update`, as `dtype`, into paused servers. Returns those that have it, and its size in bytes."""
        receivers, size = on_every_server(members, self._begin, lost), 0
        # Copies, because torch counts who has opened a tensor's memory once for each time it is shared.
        for bucket in buckets(update, self._device, dtype, BUCKET_BYTES, copies=True):
            size += sum(tensor.nbytes for _, tensor in bucket)
            receivers = self._send_bucket(receivers, bucket, lost)
        return on_every_server(receivers, lambda member: member.server.post("/finish_weight_update"), lost), size

    def close(self) -> None:
        """There is nothing to end."""

    def _begin(self, member: PooledServer) -> None:
        if self._lives.get(member) != member.lives:
            member.server.post("/init_weight_transfer_engine", {"init_info": {}})
            self._lives[member] = member.lives
        member.server.post("/start_weight_update")

    def _send_bucket(
        self, members: Sequence[PooledServer], bucket: Named, lost: Callable[[PooledServer, str], None]
    ) -> list[PooledServer]:
        torch.cuda.synchronize(self._device)  # the copies may still be being made
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)

        def load(member: PooledServer) -> None:
            info = update_info(bucket, uuid)  # not shared between servers: a handle can be opened once
            member.server.post("/update_weights", {"update_info": info}, BUCKET_TIMEOUT)

        done = on_every_server(members, load, lost)
        torch.cuda.ipc_collect()
        return done


def update_info(bucket: Named, uuid: str) -> dict[str, Any]:
    """What `/update_weights` gets about the tensors in `bucket`, which are on the GPU `uuid`."""
    handles = [{uuid: reduce_tensor(tensor)[1]} for _, tensor in bucket]
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }


def is_here(url: str) -> bool:
    """Whether the server of a URL is on this machine."""
    host = urlsplit(url).hostname
    if host is None:  # a socket in the file system
        return True
    try:
        addresses = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(ipaddress.ip_address(address).is_loopback or _can_be_bound(address) for address in addresses)


def _can_be_bound(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
