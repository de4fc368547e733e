"""Whole weights over NCCL, from the trainer's GPU into the workers of vLLM servers, by vLLM's own endpoints.

Guarantees: at most `BUCKET_BYTES` beside the weights at a time on the trainer's GPU (or one tensor, if that is
larger), and vLLM's buffers; tensors are gone through once, also for several servers; each server has a group of its
own, so one that dies beforehand takes no other with it. Needs vLLM in the trainer's environment, for its communicator.

A server that dies while it receives leaves NCCL waiting: that ends with an `EngineError` after `BUCKET_TIMEOUT`.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import torch
from packaging.version import Version

from trl_a3po.engines.vllm.servers.http import HttpFault
from trl_a3po.engines.vllm.servers.pooled_server import PooledServer
from trl_a3po.engines.vllm.servers.server import LOAD_TIMEOUT
from trl_a3po.errors import EngineError
from trl_a3po.protocol.weights import GatheredTensors, WeightUpdate

BUCKET_BYTES = 512 * 2**20
BUCKET_TIMEOUT = 120.0  # seconds

Named = list[tuple[str, torch.Tensor]]


class NcclTransfer:
    """
    Args:
        device: the trainer's GPU.

    Raises:
        EngineError: the device is no GPU, or vLLM is not installed here.
    """

    def __init__(self, device: torch.device):
        if device.type != "cuda":
            raise EngineError(
                f"vllm_weight_transfer='nccl' takes weights from a GPU, but the trainer is on {device}: set 'disk'."
            )
        try:
            import vllm
        except ImportError as error:
            raise EngineError(
                "vllm_weight_transfer='nccl' needs vLLM in the trainer's environment, for its NCCL communicator: pip "
                "install 'trl-a3po[vllm]', or set vllm_weight_transfer='disk'."
            ) from error
        self._device = device
        self._packs_at_init = Version(vllm.__version__).release[:2] >= (0, 28)
        self._groups: dict[PooledServer, Any] = {}
        self._lives: dict[PooledServer, int] = {}  # which of a server's a group is of

    hint = "Set vllm_weight_transfer='disk' to go without NCCL."

    def send(
        self,
        members: Sequence[PooledServer],
        update: WeightUpdate,
        dtype: torch.dtype,
        lost: Callable[[PooledServer, str], None],
    ) -> tuple[list[PooledServer], int]:
        """Load `update`, as `dtype`, into paused servers. Returns those that have it, and its size in bytes.

        Raises:
            EngineError: a server took part and then did not finish; no server can be reached.
        """
        receivers = self._each(members, self._begin, lost)
        if not receivers:
            raise EngineError("No vLLM server could be reached to take the weights. Resume from the last checkpoint.")
        size = 0
        for bucket in buckets(update, self._device, dtype, BUCKET_BYTES):
            size += sum(tensor.nbytes for _, tensor in bucket)
            for member in receivers:
                self._send_bucket(member, bucket)
        return self._each(receivers, lambda member: member.server.post("/finish_weight_update"), lost), size

    def forget(self, member: PooledServer) -> None:
        """Drop the group of a server that was lost: a new process there needs a new one."""
        if (group := self._groups.pop(member, None)) is not None:
            group.group.store = group.group.socket = None  # the server would wait on the socket

    def close(self) -> None:
        for member in list(self._groups):
            self.forget(member)

    def _each(
        self,
        members: Sequence[PooledServer],
        step: Callable[[PooledServer], Any],
        lost: Callable[[PooledServer, str], None],
    ) -> list[PooledServer]:
        done = []
        for member in members:
            try:
                step(member)
                done.append(member)
            except HttpFault as fault:
                self.forget(member)
                lost(member, str(fault))
        return done

    def _begin(self, member: PooledServer) -> None:
        if self._lives.get(member) != member.lives:
            self.forget(member)
        if member not in self._groups:
            self._groups[member], self._lives[member] = self._joined(member), member.lives
        member.server.post("/start_weight_update")

    def _joined(self, member: PooledServer) -> Any:
        """A group of this process, as rank 0, and the workers of a server."""
        workers = member.server.get("/get_world_size")["world_size"]
        host = urlsplit(member.server.url).hostname or "localhost"  # of a socket in the file system
        rendezvous = {"master_address": _address_towards(host), "master_port": _free_port(), "rank_offset": 1}
        rendezvous["world_size"] = 1 + workers
        if self._packs_at_init:
            rendezvous["packed"] = True
        theirs = _in_thread(
            member.server.post, "/init_weight_transfer_engine", {"init_info": rendezvous}, LOAD_TIMEOUT
        )
        ours = _in_thread(self._join, rendezvous)
        return self._both(member, ours, theirs)

    def _join(self, rendezvous: dict[str, Any]) -> Any:
        with torch.cuda.device(self._device):
            if self._packs_at_init:
                from vllm.distributed.weight_transfer.nccl_common import trainer_init

                return trainer_init(rendezvous)
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            return NCCLWeightTransferEngine.trainer_init(rendezvous)

    def _send_bucket(self, member: PooledServer, bucket: Named) -> None:
        info = {
            "names": [name for name, _ in bucket],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
        }
        if not self._packs_at_init:
            info["packed"] = True
        torch.cuda.synchronize(self._device)  # the weights may still be computed
        theirs = _in_thread(member.server.post, "/update_weights", {"update_info": info}, BUCKET_TIMEOUT)
        ours = _in_thread(self._broadcast, member, bucket)
        self._both(member, ours, theirs)

    def _broadcast(self, member: PooledServer, bucket: Named) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        with torch.cuda.device(self._device):
            packed_nccl_broadcast_producer(iter(bucket), self._groups[member], 0, lambda item: item[1])
            torch.cuda.synchronize(self._device)

    def _both(self, member: PooledServer, ours: Future[Any], theirs: Future[Any]) -> Any:
        """Wait for both ends, ours first to be known as failed by theirs."""
        try:
            theirs.result(LOAD_TIMEOUT)
            return ours.result(BUCKET_TIMEOUT)
        except (HttpFault, TimeoutError) as fault:
            why = str(fault) or "no end in time."
            raise EngineError(
                f"Weights did not reach the vLLM server at {member.server.url} over NCCL: {why} "
                "NCCL may still wait for it, so this process cannot go on: resume from the last checkpoint."
            ) from fault


def buckets(
    update: WeightUpdate, device: torch.device, dtype: torch.dtype, most: int, *, copies: bool = False
) -> Iterator[Named]:
    """The tensors of `update` on `device`, floating ones as `dtype`, in runs of at most `most` bytes or one tensor.

    Args:
        copies: also where a tensor could be sent as it is.
    """
    copies = copies or isinstance(update.tensors, GatheredTensors)  # these are gone when the next one is asked for
    run: Named = []
    size = 0
    for name, tensor in update.tensors.items():
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        moved = tensor.detach().to(device, kind, copy=copies).contiguous()
        if run and size + moved.nbytes > most:
            yield run
            run, size = [], 0
        run.append((name, moved))
        size += moved.nbytes
    if run:
        yield run


def _in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run it in a thread that does not keep this process from its end: a wait for NCCL may never end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="a3po-nccl", daemon=True).start()
    return future


def _address_towards(host: str) -> str:
    """Our own address as `host` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port
