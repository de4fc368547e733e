"""How a publish reaches the servers of a pool: as an adapter of its own, or as whole weights in place.

Guarantees: a publish returns when every server that can be reached carries the weights; a server that cannot be
reached, or rejects the weights, is lost to the pool and does not stop the others; a prefix cached under one version is
never used for another, because every publish has a cache salt of its own. A publish happens on the main thread, and a
server is brought up by the thread that watches it, both under `pool.changing`. Where prompts have images (`images`),
every publish discards what a server has kept of one, so that no rollout begins with what older weights made of it.

What happens to rollouts in flight (`keeps`):

- kept, with whole weights: servers pause with their sequences as they are, load the weights, and go on; later tokens
  carry the new version. `pool.py` explains how the boundary is found.
- kept, with an adapter: rollouts go on under the adapter they began with, which stays loaded, and carry its version.
- not kept: servers end the rollouts' calls at once; each rollout is sent again, as its prompt and its tokens so far,
  and goes on under the new weights.
"""

from functools import partial

from trl_a3po.engines.vllm.servers.adapter_folders import PREFIX, AdapterFolders
from trl_a3po.engines.vllm.servers.checkpoint_folder import CheckpointFolder
from trl_a3po.engines.vllm.servers.every_server import on_every_server
from trl_a3po.engines.vllm.servers.nccl import NcclTransfer
from trl_a3po.engines.vllm.servers.pool import ServerPool
from trl_a3po.engines.vllm.servers.pooled_server import PooledServer, ServedWeights
from trl_a3po.protocol.weights import WeightUpdate

_SHARED_FOLDER = "It reads them from {folder}, which must be a folder it can see: set vllm_weights_dir."


class AdapterPublishing:
    """Adapters, each loaded from a folder under a name of its own version."""

    def __init__(self, pool: ServerPool, folders: AdapterFolders, *, keeps: bool, images: bool = False):
        self._pool = pool
        self._folders = folders
        self._keeps = keeps
        self._images = images
        self.last_bytes = 0

    def publish(self, update: WeightUpdate) -> None:
        """Publish the adapter of `update`.

        Raises:
            OSError: the folder of the adapter cannot be written.
        """
        pool, folders = self._pool, self._folders
        self.last_bytes = folders.write(update)
        carriers = on_every_server(pool.reachable(), self._load, pool.mark_lost)
        pool.set_served_weights(ServedWeights(update.version, folders.newest, folders.newest), carriers)
        if not self._keeps:
            carriers = on_every_server(carriers, self._interrupt, pool.mark_lost)
        in_use = pool.in_use()
        for name in folders.outdated():
            if name not in in_use:
                on_every_server(carriers, partial(_unload, name=name), pool.mark_lost)
                folders.remove(name)

    def bring_up(self, member: PooledServer) -> None:
        """Load what was published last into a server that came back."""
        self.clean(member)
        if self._folders.newest not in member.info.adapters:  # it may have been out of reach, not gone
            self._load(member)

    def clean(self, member: PooledServer) -> None:
        """Unload adapters that an earlier run has left, and adapters that this run no longer keeps."""
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
        """What to do if a server did not load the first weights."""
        return _SHARED_FOLDER.format(folder=self._folders.root)

    def close(self) -> None:
        """Nothing to do."""

    def _load(self, member: PooledServer) -> None:
        member.server.load_adapter(self._folders.newest, str(self._folders.folders[self._folders.newest]))
        if self._images:
            member.server.forget_images()

    def _interrupt(self, member: PooledServer) -> None:
        self._pool.abort_calls(member, all_of_them=False)
        member.server.resume()


def _unload(member: PooledServer, name: str) -> None:
    member.server.unload_adapter(name)


class WeightsPublishing:
    """Whole weights, loaded in place of the weights that a server has.

    Args:
        pool: the servers.
        folder: where the weights are written if they travel by disk.
        transfer: how the weights travel from GPU to GPU; `None` if they travel by disk.
        keeps: whether rollouts in flight keep their cache.
        run: the name of the run, which begins each cache salt.
        images: prompts may have images.
    """

    def __init__(
        self,
        pool: ServerPool,
        folder: CheckpointFolder,
        transfer: NcclTransfer | None,
        *,
        keeps: bool,
        run: str,
        images: bool = False,
    ):
        self._pool = pool
        self._folder = folder
        self._transfer = transfer
        self._keeps = keeps
        self._run = run
        self._images = images
        self._number = 0
        self.last_bytes = 0

    def publish(self, update: WeightUpdate) -> None:
        """Publish the weights of `update`.

        Raises:
            OSError: the checkpoint folder cannot be written.
            EngineError: a transfer between GPUs has failed in a way that the run cannot survive.
        """
        pool, self._number = self._pool, self._number + 1
        if self._transfer is None:
            self.last_bytes = self._folder.write(update)
        pool.hold_jobs(True)
        try:
            targets = on_every_server(pool.reachable(), self._pause, pool.mark_lost)
            if self._transfer is None:
                carriers = on_every_server(targets, self._reload, pool.mark_lost)
            else:
                carriers, self.last_bytes = self._transfer.send(targets, update, self._folder.dtype, pool.mark_lost)
            pool.set_served_weights(ServedWeights(update.version, "", f"{self._run}-{self._number}"), carriers)
            on_every_server(carriers, lambda member: member.server.resume(), pool.mark_lost)
        finally:
            pool.hold_jobs(False)

    def bring_up(self, member: PooledServer) -> None:
        """Load what was published last into a server that came back. Only for weights that travel by disk."""
        member.server.pause("abort")
        self._reload(member)
        member.server.resume()

    @property
    def brings_up(self) -> bool:
        """Whether a server that came back can be brought up without a publish."""
        return self._transfer is None

    @property
    def hint(self) -> str:
        """What to do if a server did not load the first weights."""
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
        if self._images:
            member.server.forget_images()

    def _pause(self, member: PooledServer) -> None:
        if self._keeps:
            member.server.pause("keep")
            self._pool.note_publish(member)
        else:
            self._pool.abort_calls(member, all_of_them=True)
