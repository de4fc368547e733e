"""`VLLMServers`: samples on vLLM servers that are running already.

Guarantees, beside those of `protocol/engine.py`: a policy with an adapter is published as the adapter alone, and one
without as whole weights; servers are left as they were found, except for their weights.

Where to look:

- `pool.py` assigns requests to servers, and `ServerPool._record_tokens` gives every token its policy version;
- `publishing.py` publishes weights, and decides what happens to rollouts in flight;
- `server_watch.py` brings back servers that died;
- `opening.py` and `startup.py` wait for servers and check them.
"""

import logging
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from trl_a3po.engines.scorer_choice import ScorerChoice, Text
from trl_a3po.engines.usage import NOT_STARTED, check_start, check_version_order
from trl_a3po.engines.vllm.adapter_support import adapter_obstacle
from trl_a3po.engines.vllm.servers.adapter_folders import AdapterFolders
from trl_a3po.engines.vllm.servers.checkpoint_folder import CheckpointFolder
from trl_a3po.engines.vllm.servers.folders import EngineFolder
from trl_a3po.engines.vllm.servers.http import ConnectionFault, HttpFault, StatusFault
from trl_a3po.engines.vllm.servers.nccl import NcclTransfer
from trl_a3po.engines.vllm.servers.opening import await_servers, server_requirements
from trl_a3po.engines.vllm.servers.pool import ServerPool
from trl_a3po.engines.vllm.servers.pooled_server import PooledServer, ServedWeights
from trl_a3po.engines.vllm.servers.publishing import AdapterPublishing, WeightsPublishing
from trl_a3po.engines.vllm.servers.scoring import score
from trl_a3po.engines.vllm.servers.server import Server, ServerInfo
from trl_a3po.engines.vllm.servers.server_watch import ServerWatch
from trl_a3po.engines.vllm.servers.startup import check_server
from trl_a3po.engines.vllm.servers.weight_route import Setting, weight_transfer
from trl_a3po.errors import EngineError
from trl_a3po.models.replica import check_names
from trl_a3po.protocol.engine import EngineEvent, EngineStats, GroupRequest, SamplingSettings
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate

logger = logging.getLogger(__name__)


class _Serving(NamedTuple):
    """What an engine has from its start on."""

    pool: ServerPool
    publishing: AdapterPublishing | WeightsPublishing


class VLLMServers:
    """An `Engine` on vLLM servers.

    Args:
        urls: of running servers, at least one.
        folder: where weights are written for the servers to read; each engine makes a folder of its own in it.
        kv_on_publish: what happens to rollouts in flight when weights change.
        kept_versions: adapters that stay loaded, `max_staleness + 2`.
        transfer: how whole weights reach the servers: "disk"; "nccl", from GPU to GPU; or "auto", which takes
            that where it can (`weight_route.py`).
        trainer_device: where the weights are; NCCL and CUDA IPC take them from there.
        deterministic: what is sampled depends on the seed, the request and the weights alone, not on what else a
            server decodes. Needs `VLLM_BATCH_INVARIANT=1` there, on a GPU of compute capability 8.0 or higher, and
            sends a seed with every request: vLLM then draws the noise of each sequence by itself, which is slower.
        images: prompts may have images. Whole weights then go by disk.
        max_prompt_tokens: longest prompt; `None` leaves that to the servers' context.
        start_timeout: seconds until all servers must be ready.
        request_timeout: seconds for one call.
        outage_timeout: seconds without any server before the run ends.
        poll: seconds between two looks at a server.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        folder: Path,
        kv_on_publish: Literal["keep", "recompute"] = "keep",
        kept_versions: int = 6,
        transfer: Setting = "auto",
        trainer_device: torch.device | str = "cpu",
        deterministic: bool = False,
        images: bool = False,
        max_prompt_tokens: int | None = None,
        start_timeout: float = 600.0,
        request_timeout: float = 600.0,
        outage_timeout: float = 120.0,
        poll: float = 1.0,
    ):
        self._owner = os.getpid()
        self._urls = list(urls)
        self._folder = EngineFolder(Path(folder))
        self._root = self._folder.path
        self._keeps = kv_on_publish == "keep"
        self._kept_versions = kept_versions
        self._transfer = transfer
        self._trainer_device = torch.device(trainer_device)
        self._deterministic = deterministic
        self._images = images
        self._max_prompt_tokens = max_prompt_tokens
        self._start_timeout = start_timeout
        self._request_timeout = request_timeout
        self._watch_settings: dict[str, Any] = {"outage_timeout": outage_timeout, "poll": poll}
        self._serving: _Serving | None = None
        self._watch: ServerWatch | None = None
        self._names: set[str] = set()
        self._version = -1
        self._publish_seconds = 0.0
        self._scorers = ScorerChoice()
        self._closed = False

    # --- beginning and end --------------------------------------------------------------------------------------

    def start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        check_start(update, used=self._serving is not None or self._closed)
        if spec.peft_config is not None and (obstacle := adapter_obstacle(spec.peft_config, _trained(update))):
            raise ValueError(f"vLLM cannot serve this adapter, because {obstacle}: set lora_sync='merged'.")
        self._sampling = sampling
        self._names = set(update.specs)
        self._requirements = server_requirements(
            spec,
            sampling,
            max_prompt_tokens=self._max_prompt_tokens,
            kept_versions=self._kept_versions,
            # An adapter goes by disk.
            transfer=self._transfer if spec.peft_config is None and self._transfer == "nccl" else None,
            deterministic=self._deterministic,
            counts_tokens=self._keeps and spec.peft_config is None,
            images=self._images,
        )
        self._folder.make()
        try:
            self._start(spec, sampling, update)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked copy of the trainer owns no servers
            return
        self._closed = True
        try:
            if self._serving is not None:
                self._serving.pool.close()
                if self._watch is not None:
                    self._watch.join()
                for member in self._serving.pool.members:
                    self._leave(member, self._serving)
        finally:
            if self._serving is not None:
                self._serving.publishing.close()
            self._folder.remove()

    # --- the protocol -------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Raises `ValueError` for a request with images, if prompts were to have none."""
        with_images = [request.request_id for request in requests if request.images is not None]
        if with_images and not self._images:
            raise ValueError(f"Request {with_images[0]} has images, but the engine was built for prompts without.")
        self._started().pool.submit(requests)

    def wait(self, timeout: float) -> list[EngineEvent]:
        return self._started().pool.wait(timeout)

    def cancel(self, request_ids: Sequence[int]) -> None:
        self._started().pool.cancel(request_ids)

    def end_episodes(self, episodes: Sequence[int]) -> None:
        self._started().pool.end_episodes(episodes)

    def publish(self, update: WeightUpdate) -> None:
        """See `Engine.publish`. Raises `ValueError` when the update does not fit the weights the engine was started
        with, or is older than the version published last."""
        began, serving = time.monotonic(), self._started()
        serving.pool.raise_if_over()
        check_names(self._names, update)
        check_version_order(update, self._version)
        with serving.pool.changing:
            self._publish(serving.publishing, update)
        self._version = update.version
        self._publish_seconds = time.monotonic() - began

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        """See `Engine.score`. A text is always scored by the same server, as long as that can be reached: with as many
        texts as servers, a check sees all of them."""
        pool, publishing = self._started()
        if not prompt_ids or not completion_ids:
            raise ValueError("There are no tokens to score.")
        deadline, text = time.monotonic() + timeout, (tuple(prompt_ids), tuple(completion_ids))
        fault: HttpFault | None = None
        while (left := deadline - time.monotonic()) > 0:
            pool.raise_if_over()
            member = self._scorer(pool, text)
            if member is not None:
                served_weights = ServedWeights(
                    self._version, publishing.model_name(member), f"score-{uuid.uuid4().hex}"
                )
                try:
                    logps = score(member.server, served_weights, self._sampling, *text, timeout=max(1.0, left))
                except HttpFault as error:
                    fault = error
                    _handle_score_fault(pool, member, error)
                else:
                    return logps, served_weights.version
            time.sleep(0.1)
        raise EngineError(
            f"No vLLM server has scored {len(completion_ids)} known tokens within {timeout:g} s"
            f"{f': {fault}' if fault else ''}."
        )

    def stats(self) -> EngineStats:
        """`extra`: servers that carry the current version, and counts since the start: of servers lost and back, of
        calls that failed, for their limit, for garbage; of tokens whose version is a bound; bytes of the last
        publish."""
        pool, publishing = self._started()
        active, waiting, busy_seconds, counts = pool.numbers()
        return EngineStats(
            tokens=pool.tokens,
            busy_seconds=busy_seconds,
            active_rollouts=active,
            waiting_requests=waiting,
            publish_seconds=self._publish_seconds,
            awaits_publish=pool.is_behind,
            extra={name: float(count) for name, count in counts.items()} | {"published_bytes": publishing.last_bytes},
        )

    # --- starting -----------------------------------------------------------------------------------------------

    def _start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        servers = [Server(url) for url in self._urls]
        found = await_servers(servers, self._requirements, self._start_timeout)
        for server, info in zip(servers, found, strict=True):
            check_server(server.url, info, self._requirements)
        pool, publishing = self._serving = self._serve(spec, sampling, list(zip(servers, found, strict=True)))
        for member, info in zip(pool.members, found, strict=True):
            pool.admit(member, info)
            publishing.clean(member)
        self._publish(publishing, update)
        self._version = update.version
        if down := [member for member in pool.members if member.state != "live"]:
            raise EngineError(
                f"The vLLM server at {down[0].server.url} did not take the first weights: {down[0].last_fault} If "
                f"{down[0].info.serves!r}, which it serves, is another model than the trained one, start it with "
                f"that. {publishing.hint}"
            )
        self._watch = ServerWatch(
            pool,
            check=lambda server, info: check_server(server.url, info, self._requirements),
            deliver=publishing.bring_up if publishing.brings_up else None,
            **self._watch_settings,
        )
        self._watch.start()

    def _serve(
        self, spec: PolicySpec, sampling: SamplingSettings, servers: list[tuple[Server, ServerInfo]]
    ) -> _Serving:
        transfer: NcclTransfer | None = None
        if spec.peft_config is None:
            urls, found = [server.url for server, _ in servers], [info for _, info in servers]
            transfer = weight_transfer(self._transfer, self._trainer_device, urls, found)
        pool = ServerPool(
            servers,
            sampling,
            request_timeout=self._request_timeout,
            seeds=self._deterministic,
            # An adapter has a prefix cache of its own, whatever the salt.
            keeps_prefixes=self._keeps and spec.peft_config is None,
        )
        if spec.peft_config is None:
            folder = CheckpointFolder(self._root, spec)
            publishing = WeightsPublishing(
                pool, folder, transfer, keeps=self._keeps, run=self._root.name, images=self._images
            )
            return _Serving(pool, publishing)
        folders = AdapterFolders(self._root, spec, self._kept_versions)
        return _Serving(pool, AdapterPublishing(pool, folders, keeps=self._keeps, images=self._images))

    def _publish(self, publishing: AdapterPublishing | WeightsPublishing, update: WeightUpdate) -> None:
        try:
            publishing.publish(update)
        except OSError as error:
            raise EngineError(
                f"Version {update.version} could not be written to {self._root}: {error}. Free space there, or set "
                "vllm_weights_dir to another folder that the servers can read."
            ) from error

    def _leave(self, member: PooledServer, serving: _Serving) -> None:
        """Have a server stop what it does for us, as far as it still answers."""
        if member.state == "down":
            return
        try:
            if serving.pool.was_busy:
                member.server.pause("abort")
                member.server.resume()
            serving.publishing.leave(member)
        except HttpFault as fault:
            logger.warning("%s", fault)

    # --- scoring ------------------------------------------------------------------------------------------------

    def _scorer(self, pool: ServerPool, text: Text) -> PooledServer | None:
        live = {member.server.url: member for member in pool.live()}
        return live[self._scorers.choose(text, list(live))] if live else None

    def _started(self) -> _Serving:
        if os.getpid() != self._owner:
            raise EngineError(
                f"The vLLM engine of process {self._owner} cannot be used in process {os.getpid()}, which was forked "
                "from it: use it where it was started, or start another one there."
            )
        if self._serving is None:
            raise EngineError(NOT_STARTED)
        return self._serving


def _handle_score_fault(pool: ServerPool, member: PooledServer, fault: HttpFault) -> None:
    """Raise `ValueError` for tokens that no server can score; give up a server that is not there any more."""
    if isinstance(fault, StatusFault) and fault.status in (400, 413, 422):
        raise ValueError(f"These tokens cannot be scored: {fault}") from fault
    if isinstance(fault, ConnectionFault) or (isinstance(fault, StatusFault) and fault.status == 404):
        pool.mark_lost(member, str(fault))


def _trained(update: WeightUpdate) -> set[str]:
    return {name for name in update.specs if ".lora_" in name}
