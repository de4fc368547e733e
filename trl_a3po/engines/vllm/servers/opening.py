"""Servers for a run: what they must be, and waiting for them.

Guarantees: a URL without a vLLM behind it is named
at once, one that does not answer yet after a limit, both with the command that starts a server right.
"""

import logging
import time
from collections.abc import Sequence

from trl_a3po.engines.vllm.servers.completions import logprobs_modes
from trl_a3po.engines.vllm.servers.http import AnswerFault, ConnectionFault, HttpFault, StatusFault
from trl_a3po.engines.vllm.servers.server import Server, ServerInfo
from trl_a3po.engines.vllm.servers.startup import ServerRequirements
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.protocol.weights import PolicySpec

logger = logging.getLogger(__name__)

SHAPE = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
LOADING = (502, 503, 504)  # what a proxy answers while there is no server behind it


def server_requirements(
    spec: PolicySpec,
    sampling: SamplingSettings,
    *,
    max_prompt_tokens: int | None,
    kept_versions: int,
    transfer: str | None,
    deterministic: bool,
    counts_tokens: bool,
    images: bool,
) -> ServerRequirements:
    """What the run needs of a server. The arguments are those of `ServerRequirements` and `VLLMServers`."""
    config, longest = spec.config.get_text_config(), (max_prompt_tokens or 1) + sampling.max_new_tokens
    model_has = getattr(config, "max_position_embeddings", None)
    if model_has is not None:  # a completion ends where the context ends
        longest = min(longest, model_has)
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
        counts_tokens=counts_tokens,
        images=images,
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
