"""Servers for a run: what they must be, started here or waited for.

Guarantees: what a server of ours does not say before it ends is in the error; a URL without a vLLM behind it is named
at once, one that does not answer yet after a limit, both with the command that starts a server right.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trl_a3po.engines.vllm.checkpoint_folder import CheckpointFolder
from trl_a3po.engines.vllm.completions import logprobs_modes
from trl_a3po.engines.vllm.http import AnswerFault, ConnectionFault, HttpFault, StatusFault
from trl_a3po.engines.vllm.server import Server, ServerInfo
from trl_a3po.engines.vllm.server_process import ServerProcess
from trl_a3po.engines.vllm.startup import ServerRequirements
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.protocol.weights import GatheredTensors, PolicySpec, WeightUpdate

logger = logging.getLogger(__name__)

SHAPE = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
LOADING = (502, 503, 504)  # what a proxy answers while there is no server behind it


@dataclass(frozen=True)
class OwnServer:
    """How a server is started here.

    Args:
        python: an interpreter that has vLLM, if there is one.
        device: where it computes.
        gpu_memory: the share of a GPU's memory it takes.
        slots: sequences it decodes at a time; `None`: vLLM's choice.
        threads: its CPU threads.
        max_restarts: times it is started again.
    """

    python: str | None
    device: torch.device
    gpu_memory: float
    slots: int | None
    threads: int | None
    max_restarts: int

    def start(
        self, requirements: ServerRequirements, spec: PolicySpec, update: WeightUpdate, root: Path, timeout: float
    ) -> ServerProcess:
        """Start one on the base weights of `update`, which no later update of an adapter carries."""
        if self.python is None:
            raise EngineError(
                "engine='vllm' without vllm_server_urls starts a server itself, and vLLM is not installed here: pip "
                "install vllm, set vllm_python to an interpreter that has it, or set vllm_server_urls to running "
                "servers."
            )
        base = CheckpointFolder(root / "base", spec)
        base.write(base_weights(spec, update))
        options = {"--gpu-memory-utilization": str(self.gpu_memory)} if self.device.type == "cuda" else {}
        if self.slots is not None:
            options["--max-num-seqs"] = str(self.slots)
        process = ServerProcess(
            self.python,
            requirements.started_here(str(base.folder), options),
            self.device,
            root.parent / "vllm-server.log",
            threads=self.threads,
            max_restarts=self.max_restarts,
        )
        try:
            process.wait_until_ready(timeout)
        except BaseException:
            process.stop()
            raise
        return process


def server_requirements(
    spec: PolicySpec,
    sampling: SamplingSettings,
    *,
    max_prompt_tokens: int | None,
    context: int | None,
    kept_versions: int,
    transfer: str | None,
    deterministic: bool,
) -> ServerRequirements:
    """What the run needs of a server. The arguments are those of `ServerRequirements` and `VLLMEngine`."""
    config, longest = spec.config.get_text_config(), (max_prompt_tokens or 1) + sampling.max_new_tokens
    if context is None:
        model_has = getattr(config, "max_position_embeddings", None)
        context = model_has if max_prompt_tokens is None else longest
    return ServerRequirements(
        model=spec.config._name_or_path or "MODEL",
        dtype=str(spec.dtype).removeprefix("torch."),
        longest=longest,
        context=max(longest, context or 0),
        logprobs_modes=logprobs_modes(sampling),
        max_lora_rank=spec.peft_config.r if spec.peft_config is not None else 0,
        max_loras=kept_versions if spec.peft_config is not None else 0,
        transfer=transfer,
        batch_invariant=deterministic,
        shape={name: getattr(config, name) for name in SHAPE if getattr(config, name, None) is not None},
    )


def await_servers(servers: Sequence[Server], requirements: ServerRequirements, timeout: float) -> list[ServerInfo]:
    """What each says of itself, once it answers.

    Raises:
        EngineError: one does not within `timeout` seconds, or answers as no vLLM does.
    """
    deadline = time.monotonic() + timeout
    return [_await(server, requirements, timeout, deadline) for server in servers]


def _await(server: Server, requirements: ServerRequirements, timeout: float, deadline: float) -> ServerInfo:
    warned = False
    while True:
        try:
            return server.info()
        except HttpFault as fault:
            loading = isinstance(fault, ConnectionFault) or (
                isinstance(fault, StatusFault) and fault.status in LOADING
            )
            if not loading or time.monotonic() > deadline:
                raise EngineError(_unusable(server, fault, requirements)) from fault
            if not warned:
                logger.warning("Waiting up to %.0f s for the vLLM server at %s: %s", timeout, server.url, fault)
                warned = True
            time.sleep(0.5)


def _unusable(server: Server, fault: HttpFault, requirements: ServerRequirements) -> str:
    status = fault.status if isinstance(fault, StatusFault) else None
    if status in (401, 403):
        return (
            f"The server at {server.url} wants a key: {fault} Set the environment variable VLLM_API_KEY to the "
            "--api-key it was started with."
        )
    start = f"tart it with:\n\n    {requirements.command(server.url)}\n"
    if isinstance(fault, AnswerFault) or status in (404, 405, 501):
        return f"What answers at {server.url} is no vLLM server: {fault} Set vllm_server_urls to one; s{start}"
    return f"The vLLM server at {server.url} did not answer: {fault} S{start}"


def base_weights(spec: PolicySpec, update: WeightUpdate) -> WeightUpdate:
    """`update` without its adapter, under the names of the plain model."""
    if spec.peft_config is None:
        return update
    names = {
        name: name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        for name in update.tensors
        if ".lora_" not in name
    }
    if isinstance(update.tensors, GatheredTensors):
        return WeightUpdate(update.version, update.tensors.renamed(names))
    return WeightUpdate(update.version, {new: update.tensors[name] for name, new in names.items()})
