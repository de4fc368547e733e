"""`VLLMEngine`: samples on vLLM servers, running already or started here.

Guarantees (beside those of `engines/protocol.py` and `pool.py`): a publish returns when every server that can be
reached carries the version; no prefix computed by one version's weights serves another's (every publish has a salt of
its own); a policy with an adapter is sent as that adapter alone, one without as whole weights.

What happens to rollouts in flight when a version is published (`kv_on_publish`):

- "keep", whole weights: servers pause with their sequences as they are, take the weights, and go on; later tokens
  carry the new version. That needs the tokens of each to be streamed (`pool.py` says how the boundary is known).
- "keep", an adapter: they go on under the adapter they began with, which stays loaded, and carry its version.
- "recompute": servers end them where they are; they go out again, prompt and tokens so far, under the new weights.

Publishing happens on the main thread, under `pool.changing`, which a server that comes back waits for.
"""

import importlib.util
import logging
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from trl_a3po.engines.protocol import EngineEvent, EngineStats, GroupRequest, SamplingSettings
from trl_a3po.engines.vllm.adapters import PREFIX, AdapterFolders, adapter_obstacle
from trl_a3po.engines.vllm.completions import logprobs_modes
from trl_a3po.engines.vllm.http import ConnectionFault, HttpFault, StatusFault
from trl_a3po.engines.vllm.nccl import NcclTransfer
from trl_a3po.engines.vllm.pool import Member, Publication, ServerPool
from trl_a3po.engines.vllm.process import ServerProcess
from trl_a3po.engines.vllm.scoring import score
from trl_a3po.engines.vllm.server import Facts, Server
from trl_a3po.engines.vllm.startup import Needs, check_server
from trl_a3po.engines.vllm.weights import CheckpointFolder
from trl_a3po.errors import EngineError
from trl_a3po.publish.policy import PolicySpec, WeightUpdate
from trl_a3po.publish.replica import check_names

logger = logging.getLogger(__name__)


class VLLMEngine:
    """An `Engine` on vLLM servers.

    Args:
        urls: of running servers; none starts one here.
        folder: where weights are written for the servers to read; each engine makes a folder of its own in it.
        kv_on_publish: what happens to rollouts in flight when weights change.
        kept_versions: adapters that stay loaded, `max_staleness + 2`.
        transfer: how whole weights reach the servers: "disk", "nccl", or "auto", which takes NCCL where the servers
            were started for it and vLLM is installed here.
        trainer_device: where the weights are; NCCL takes them from there.
        max_prompt_tokens: longest prompt; `None` leaves that to the servers' context.
        context: tokens of a server's context; `None`: the model's, or what `max_prompt_tokens` needs.
        python, device, gpu_memory, slots, threads, max_restarts: of a server started here: an interpreter that has
            vLLM, where it computes, the share of a GPU's memory it takes, sequences it decodes at a time (`None`:
            vLLM's choice), its CPU threads, times it is started again.
        start_limit: seconds until all servers must be ready.
        request_limit: seconds for one call.
        outage_limit: seconds without any server before the run ends.
        poll: seconds between two looks at a server.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        folder: Path,
        kv_on_publish: Literal["keep", "recompute"] = "keep",
        kept_versions: int = 6,
        transfer: Literal["auto", "disk", "nccl"] = "auto",
        trainer_device: torch.device | str = "cpu",
        max_prompt_tokens: int | None = None,
        context: int | None = None,
        python: str | None = None,
        device: torch.device | str = "cpu",
        gpu_memory: float = 0.9,
        slots: int | None = None,
        threads: int | None = None,
        max_restarts: int = 3,
        start_limit: float = 600.0,
        request_limit: float = 600.0,
        outage_limit: float = 120.0,
        poll: float = 1.0,
    ):
        self._urls = list(urls)
        self._root = Path(folder).absolute() / f"engine-{uuid.uuid4().hex[:8]}"
        self._keeps = kv_on_publish == "keep"
        self._kept_versions = kept_versions
        self._transfer = transfer
        self._trainer_device = torch.device(trainer_device)
        self._max_prompt_tokens = max_prompt_tokens
        self._python = python
        self._device = torch.device(device)
        self._context = context
        self._gpu_memory = gpu_memory
        self._slots = slots
        self._threads = threads
        self._max_restarts = max_restarts
        self._start_limit = start_limit
        self._limits = {"request_limit": request_limit, "outage_limit": outage_limit, "poll": poll}
        self._pool: ServerPool | None = None
        self._process: ServerProcess | None = None
        self._adapters: AdapterFolders | None = None
        self._weights: CheckpointFolder | None = None
        self._nccl: NcclTransfer | None = None
        self._names: set[str] = set()
        self._version = -1
        self._publishes = 0
        self._publish_seconds = 0.0
        self._published_bytes = 0
        self._scorers: dict[tuple, str] = {}
        self._closed = False

    # --- beginning and end --------------------------------------------------------------------------------------

    def start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        if self._pool is not None or self._closed:
            raise EngineError("An engine is started once: make a new one.")
        if not update.complete:
            raise ValueError("The first update must be complete.")
        if spec.peft_config is not None and (obstacle := adapter_obstacle(spec.peft_config, _trained(update))):
            raise ValueError(f"vLLM cannot serve this adapter, because {obstacle}: set lora_sync='merged'.")
        self._sampling = sampling
        self._names = set(update.specs)
        self._needs = self._needs_of(spec)
        self._root.mkdir(parents=True)
        weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        try:
            self._start(spec, sampling, update)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._closed = True
        try:
            if self._pool is not None:
                self._pool.close()
                for member in self._pool.members:
                    self._leave(member)
        finally:
            if self._process is not None:
                self._process.stop()
            if self._nccl is not None:
                self._nccl.close()
            shutil.rmtree(self._root, ignore_errors=True)

    # --- the protocol -------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self._started().submit(requests)

    def wait(self, timeout: float) -> list[EngineEvent]:
        return self._started().wait(timeout)

    def cancel(self, request_ids: Sequence[int]) -> None:
        self._started().cancel(request_ids)

    def publish(self, update: WeightUpdate) -> None:
        """See `Engine.publish`. Raises `ValueError` when the update does not fit the weights the engine was started
        with, or is older than the version published last."""
        began, pool = time.monotonic(), self._started()
        pool.raise_if_over()
        check_names(self._names, update)
        if update.version < self._version:
            raise ValueError(f"Version {update.version} cannot be published after version {self._version}.")
        with pool.changing:
            self._publish(update)
        self._version = update.version
        self._publish_seconds = time.monotonic() - began

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        """See `Engine.score`. A text is always scored by the same server, as long as that can be reached: with as many
        texts as servers, a check sees all of them."""
        pool = self._started()
        if not prompt_ids or not completion_ids:
            raise ValueError("There are no tokens to score.")
        deadline, key = time.monotonic() + timeout, (tuple(prompt_ids), tuple(completion_ids))
        fault: Exception | None = None
        while time.monotonic() < deadline:
            pool.raise_if_over()
            member = self._scorer(key)
            if member is None:
                time.sleep(0.1)
                continue
            publication = Publication(self._version, self._model_name(member), f"score-{uuid.uuid4().hex}")
            try:
                left = max(1.0, deadline - time.monotonic())
                logps = score(member.server, publication, self._sampling, *key, limit=left)
            except HttpFault as error:
                fault = error
                if isinstance(error, StatusFault) and error.status in (400, 413, 422):
                    raise ValueError(f"These tokens cannot be scored: {error}") from error
                if isinstance(error, ConnectionFault) or (isinstance(error, StatusFault) and error.status == 404):
                    pool.lost(member, str(error))
                time.sleep(0.1)
                continue
            pool.scored(member, len(completion_ids))
            return logps, publication.version
        raise EngineError(
            f"No vLLM server has scored {len(completion_ids)} known tokens within {timeout:g} s"
            f"{f': {fault}' if fault else ''}."
        )

    def stats(self) -> EngineStats:
        """`extra`: servers that carry the current version, and counts since the start: of servers lost and back, of
        calls that failed, for their limit, for garbage; of tokens whose version is a bound; bytes of the last
        publish."""
        pool = self._started()
        active, waiting, busy_seconds, counts = pool.numbers()
        return EngineStats(
            tokens=pool.tokens,
            busy_seconds=busy_seconds,
            active_rollouts=active,
            waiting_requests=waiting,
            restarts=self._process.restarts if self._process else 0,
            publish_seconds=self._publish_seconds,
            extra={**{name: float(count) for name, count in counts.items()}, "published_bytes": self._published_bytes},
        )

    @property
    def server_pid(self) -> int | None:
        """Process group of the server that was started here."""
        return None if self._process is None else self._process.pid

    # --- starting -----------------------------------------------------------------------------------------------

    @property
    def _wants_nccl(self) -> bool:
        """Whether servers must be started for NCCL: as set, or for one of our own on another GPU than ours."""
        if self._transfer != "auto" or self._urls:
            return self._transfer == "nccl"
        gpus = {self._device, self._trainer_device}
        return len(gpus) == 2 and {gpu.type for gpu in gpus} == {"cuda"} and _has_vllm()

    def _needs_of(self, spec: PolicySpec) -> Needs:
        config = spec.config.get_text_config()
        longest = (self._max_prompt_tokens or 1) + self._sampling.max_new_tokens
        context = self._context or getattr(config, "max_position_embeddings", None)
        if self._context is None and self._max_prompt_tokens is not None:
            context = longest
        return Needs(
            model=spec.config._name_or_path or "MODEL",
            dtype=str(spec.dtype).removeprefix("torch."),
            longest=longest,
            context=max(longest, context or 0),
            logprobs_modes=logprobs_modes(self._sampling),
            max_lora_rank=spec.peft_config.r if spec.peft_config is not None else 0,
            max_loras=self._kept_versions if spec.peft_config is not None else 0,
            transfer="nccl" if self._wants_nccl and spec.peft_config is None else None,
        )

    def _start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        if spec.peft_config is not None:
            self._adapters = AdapterFolders(self._root, spec, self._kept_versions)
        else:
            self._weights = CheckpointFolder(self._root, spec)
        servers = [Server(url) for url in self._urls] or [self._start_server(spec, update)]
        found = [self._await(server) for server in servers]
        for server, facts in zip(servers, found, strict=True):
            check_server(server.url, facts, self._needs)
        self._choose_transfer(found)
        self._pool = ServerPool(
            servers,
            sampling,
            check=lambda server, facts: check_server(server.url, facts, self._needs),
            deliver=None if self._nccl else self._bring_up,
            streams=self._keeps and self._adapters is None,
            keep_alive=self._process.keep_alive if self._process else lambda: None,
            **self._limits,
        )
        for member, facts in zip(self._pool.members, found, strict=True):
            self._pool.admit(member, facts)
            self._clean(member)
        self._publish(update)
        self._version = update.version
        down = [member for member in self._pool.members if member.state != "live"]
        if down:
            raise EngineError(
                f"The vLLM server at {down[0].server.url} did not take the first weights: {down[0].last_fault} It "
                f"reads them from {self._root.parent}, which must be a folder it can see: set vllm_weights_dir."
            )
        self._pool.watch()

    def _start_server(self, spec: PolicySpec, update: WeightUpdate) -> Server:
        """Start a server on the base weights, which no later update of an adapter carries."""
        if self._python is None:
            raise EngineError(
                "engine='vllm' without vllm_server_urls starts a server itself, and vLLM is not installed here: pip "
                "install vllm, set vllm_python to an interpreter that has it, or set vllm_server_urls to running "
                "servers."
            )
        base = CheckpointFolder(self._root / "base", spec)
        base.write(_base_weights(spec, update))
        options = {"--gpu-memory-utilization": str(self._gpu_memory)} if self._device.type == "cuda" else {}
        if self._slots is not None:
            options["--max-num-seqs"] = str(self._slots)
        needs = self._needs.started_here(str(base.folder), options)
        self._process = ServerProcess(
            self._python,
            needs,
            self._device,
            self._root.parent / "vllm-server.log",
            threads=self._threads,
            max_restarts=self._max_restarts,
        )
        self._process.start()
        self._process.wait_until_ready(self._start_limit)
        return self._process.server

    def _await(self, server: Server) -> Facts:
        deadline, told = time.monotonic() + self._start_limit, False
        while True:
            try:
                return server.facts()
            except HttpFault as fault:
                if not isinstance(fault, ConnectionFault) or time.monotonic() > deadline:
                    raise EngineError(
                        f"The vLLM server at {server.url} did not answer: {fault} Start it with:\n\n    "
                        f"{self._needs.command(server.url)}\n"
                    ) from fault
                if not told:
                    logger.warning(
                        "Waiting up to %.0f s for the vLLM server at %s: %s", self._start_limit, server.url, fault
                    )
                    told = True
                time.sleep(0.5)

    def _choose_transfer(self, found: Sequence[Facts]) -> None:
        if self._adapters is not None or self._transfer == "disk":
            return
        possible = self._trainer_device.type == "cuda" and all(facts.transfer == "nccl" for facts in found)
        if self._transfer == "nccl" or (possible and _has_vllm()):
            self._nccl = NcclTransfer(self._trainer_device)

    def _clean(self, member: Member) -> None:
        """Unload what a run before this one left, or this one no longer keeps."""
        kept = self._adapters.folders if self._adapters is not None else {}
        for name in member.facts.adapters:
            if name.startswith(PREFIX) and name not in kept:
                member.server.unload_adapter(name)

    def _leave(self, member: Member) -> None:
        """Have a server that was not started here stop what it does for us, as far as it still answers."""
        if self._process is not None or member.state == "down":
            return
        try:
            if self._pool.was_busy:
                member.server.pause("abort")
                member.server.resume()
            for name in self._adapters.folders if self._adapters else ():
                member.server.unload_adapter(name)
        except HttpFault as fault:
            logger.warning("%s", fault)

    # --- publishing ---------------------------------------------------------------------------------------------

    def _publish(self, update: WeightUpdate) -> None:
        self._publishes += 1
        try:
            if self._adapters is not None:
                self._publish_adapter(update)
            else:
                self._publish_weights(update)
        except OSError as error:
            raise EngineError(
                f"Version {update.version} could not be written to {self._root}: {error}. Free space there, or set "
                "vllm_weights_dir to another folder that the servers can read."
            ) from error

    def _publish_adapter(self, update: WeightUpdate) -> None:
        pool, folders = self._pool, self._adapters
        self._published_bytes = folders.write(update)
        carriers = self._on_all(pool.targets(), lambda member: self._load_adapter(member.server))
        pool.set_publication(Publication(update.version, folders.newest, folders.newest), carriers)
        if not self._keeps:
            carriers = self._on_all(carriers, self._interrupt)
        in_use = pool.in_use()
        for name in folders.outdated():
            if name not in in_use:
                self._on_all(carriers, lambda member, name=name: member.server.unload_adapter(name))
                folders.remove(name)

    def _publish_weights(self, update: WeightUpdate) -> None:
        pool = self._pool
        if not self._nccl:
            self._published_bytes = self._weights.write(update)
        pool.hold(True)
        try:
            targets = self._on_all(pool.targets(), self._pause)
            if self._nccl:
                carriers, self._published_bytes = self._nccl.send(targets, update, self._weights.dtype, pool.lost)
            else:
                folder = str(self._weights.folder)
                carriers = self._on_all(targets, lambda member: member.server.reload_weights(folder))
            salt = f"{self._root.name}-{self._publishes}"
            pool.set_publication(Publication(update.version, "", salt), carriers)
            self._on_all(carriers, lambda member: member.server.resume())
        finally:
            pool.hold(False)

    def _pause(self, member: Member) -> None:
        if self._keeps:
            member.server.pause("keep")
            self._pool.settle(member)
        else:
            self._pool.abort_calls(member, all_of_them=True)

    def _interrupt(self, member: Member) -> None:
        self._pool.abort_calls(member, all_of_them=False)
        member.server.resume()

    def _load_adapter(self, server: Server) -> None:
        server.load_adapter(self._adapters.newest, str(self._adapters.folders[self._adapters.newest]))

    def _bring_up(self, member: Member) -> None:
        """Have a server that came back carry what was published last; by the thread that watches it."""
        server = member.server
        if self._adapters is not None:
            self._clean(member)
            if self._adapters.newest not in member.facts.adapters:  # it may have been out of reach, not gone
                self._load_adapter(server)
            return
        server.pause("abort")
        server.reload_weights(str(self._weights.folder))
        server.resume()

    def _on_all(self, members: Sequence[Member], step: Callable[[Member], None]) -> list[Member]:
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
                    self._pool.lost(member, str(fault))
        return taken

    # --- scoring ------------------------------------------------------------------------------------------------

    def _scorer(self, key: tuple) -> Member | None:
        live = {member.server.url: member for member in self._pool.live()}
        if not live:
            return None
        if self._scorers.get(key) not in live:
            used = list(self._scorers.values())
            self._scorers[key] = min(live, key=used.count)
        return live[self._scorers[key]]

    def _model_name(self, member: Member) -> str:
        return self._adapters.newest if self._adapters is not None else member.facts.model

    def _started(self) -> ServerPool:
        if self._pool is None:
            raise EngineError("The engine was not started: call start(spec, sampling, update) first.")
        return self._pool


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _trained(update: WeightUpdate) -> set[str]:
    return {name for name in update.specs if ".lora_" in name}


def _base_weights(spec: PolicySpec, update: WeightUpdate) -> WeightUpdate:
    """`update` without its adapter, under the names of the plain model."""
    if spec.peft_config is None:
        return update
    tensors = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in update.tensors.items()
        if ".lora_" not in name
    }
    return WeightUpdate(update.version, tensors)
