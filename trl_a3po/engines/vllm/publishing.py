"""How a publish reaches the servers of a pool: as an adapter of its own, or as whole weights in place.

Guarantees: a publish returns when every server that can be reached carries the weights; a server that cannot be
reached, or rejects the weights, is lost to the pool and does not stop the others; a prefix cached under one version is
never used for another, because every publish has a cache salt of its own. A publish happens on the main thread, and a
server is brought up by the thread that watches it, both under `pool.changing`.

What happens to rollouts in flight (`keeps`):

- kept, with whole weights: servers pause with their sequences as they are, load the weights, and go on; later tokens
  carry the new version. This needs streamed tokens (`pool.py` explains how the boundary is found).
- kept, with an adapter: rollouts go on under the adapter they began with, which stays loaded, and carry its version.
- not kept: servers end the rollouts' calls at once; each rollout is sent again, as its prompt and its tokens so far,
  and goes on under the new weights.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from trl_a3po.engines.vllm.adapter_folders import PREFIX, AdapterFolders
from trl_a3po.engines.vllm.checkpoint_folder import CheckpointFolder
from trl_a3po.engines.vllm.http import HttpFault
from trl_a3po.engines.vllm.ipc import IpcTransfer
from trl_a3po.engines.vllm.nccl import NcclTransfer
from trl_a3po.engines.vllm.pool import ServerPool
from trl_a3po.engines.vllm.pooled_server import PooledServer, ServedWeights
from trl_a3po.protocol.weights import WeightUpdate

_SHARED_FOLDER = "It reads them from {folder}, which must be a folder it can see: set vllm_weights_dir."


class AdapterPublishing:
    """Adapters, each loaded from a folder under a name of its own version."""

    def __init__(self, pool: ServerPool, folders: AdapterFolders, *, keeps: bool):
        self._pool = pool
        self._folders = folders
        self._keeps = keeps
        self.last_bytes = 0

    def publish(self, update: WeightUpdate) -> None:
        """Raises `OSError` when it cannot be written."""
        pool, folders = self._pool, self._folders
        self.last_bytes = folders.write(update)
        carriers = on_all(pool, pool.targets(), self._load)
        pool.set_served_weights(ServedWeights(update.version, folders.newest, folders.newest), carriers)
        if not self._keeps:
            carriers = on_all(pool, carriers, self._interrupt)
        in_use = pool.in_use()
        for name in folders.outdated():
            if name not in in_use:
                on_all(pool, carriers, partial(_unload, name=name))
                folders.remove(name)

    def bring_up(self, member: PooledServer) -> None:
        """Have a server that came back carry what was published last."""
        self.clean(member)
        if self._folders.newest not in member.info.adapters:  # it may have been out of reach, not gone
            self._load(member)

    def clean(self, member: PooledServer) -> None:
        """Unload what a run before this one left, or this one no longer keeps."""
        for name in member.info.adapters:
            if name.startswith(PREFIX) and name not in self._folders.folders:
                member.server.unload_adapter(name)

    def leave(self, member: PooledServer) -> None:
        for name in self._folders.folders:
            member.server.unload_adapter(name)

    def model_name(self, member: PooledServer) -> str:
        return self._folders.newest

    @property
    def brings_up(self) -> bool:
        """Whether a server that came back can be brought up without a publish."""
        return True

    @property
    def hint(self) -> str:
        """What to do where a server did not take the first ones."""
        return _SHARED_FOLDER.format(folder=self._folders.root)

    def close(self) -> None:
        """Nothing to do."""

    def _load(self, member: PooledServer) -> None:
        member.server.load_adapter(self._folders.newest, str(self._folders.folders[self._folders.newest]))

    def _interrupt(self, member: PooledServer) -> None:
        self._pool.abort_calls(member, all_of_them=False)
        member.server.resume()


def _unload(member: PooledServer, name: str) -> None:
    member.server.unload_adapter(name)


class WeightsPublishing:
    """Whole weights, loaded over those a server has.

    Args:
        folder: where they are written, when they go by disk.
        link: what takes them to the servers instead of the disk.
        run: names the run in salts.
    """

    def __init__(
        self,
        pool: ServerPool,
        folder: CheckpointFolder,
        transfer: NcclTransfer | IpcTransfer | None,
        *,
        keeps: bool,
        run: str,
    ):
        self._pool = pool
        self._folder = folder
        self._transfer = transfer
        self._keeps = keeps
        self._run = run
        self._number = 0
        self.last_bytes = 0

    def publish(self, update: WeightUpdate) -> None:
        """Raises `OSError` when it cannot be written, `EngineError` when a link breaks for good."""
        pool, self._number = self._pool, self._number + 1
        if self._transfer is None:
            self.last_bytes = self._folder.write(update)
        pool.hold(True)
        try:
            targets = on_all(pool, pool.targets(), self._pause)
            if self._transfer is None:
                carriers = on_all(pool, targets, self._reload)
            else:
                carriers, self.last_bytes = self._transfer.send(targets, update, self._folder.dtype, pool.lost)
            pool.set_served_weights(ServedWeights(update.version, "", f"{self._run}-{self._number}"), carriers)
            on_all(pool, carriers, lambda member: member.server.resume())
        finally:
            pool.hold(False)

    def bring_up(self, member: PooledServer) -> None:
        """Have a server that came back carry what was published last; by disk alone."""
        member.server.pause("abort")
        self._reload(member)
        member.server.resume()

    @property
    def brings_up(self) -> bool:
        """Whether a server that came back can be brought up without a publish."""
        return self._transfer is None

    @property
    def hint(self) -> str:
        """What to do where a server did not take the first ones."""
        return _SHARED_FOLDER.format(folder=self._folder.root) if self._transfer is None else self._transfer.hint

    def clean(self, member: PooledServer) -> None:
        """There is nothing that another run could have left."""

    def leave(self, member: PooledServer) -> None:
        """A server keeps the weights it has."""

    def model_name(self, member: PooledServer) -> str:
        return member.info.model

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()

    def _reload(self, member: PooledServer) -> None:
        member.server.reload_weights(str(self._folder.folder))

    def _pause(self, member: PooledServer) -> None:
        if self._keeps:
            member.server.pause("keep")
            self._pool.settle(member)
        else:
            self._pool.abort_calls(member, all_of_them=True)


def on_all(
    pool: ServerPool, members: Sequence[PooledServer], step: Callable[[PooledServer], None]
) -> list[PooledServer]:
    """Do one step on all members at a time; those that took it. One that did not is lost."""
    if not members:
        return []
    taken = []
    with ThreadPoolExecutor(len(members)) as executor:
        for member, future in [(member, executor.submit(step, member)) for member in members]:
            try:
                future.result()
                taken.append(member)
            except HttpFault as fault:
                pool.lost(member, str(fault))
    return taken
