"""What a run needs of a vLLM server, checked before anything is sampled, and the command that starts one right.

Guarantees: pure functions; everything that is missing is named at once, with that command.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from packaging.version import InvalidVersion, Version

from trl_a3po.engines.vllm.adapter_support import rank_option
from trl_a3po.engines.vllm.servers.server import ServerInfo
from trl_a3po.errors import EngineError

EXTENSION = Path(__file__).parent / "extension" / "a3po_server.py"
OLDEST, NEWEST = "0.22", "0.31"
OLDEST_WITH_IMAGES = "0.31"
_IMAGE_OPTIONS = {
    "--limit-mm-per-prompt": json.dumps({"video": 0, "audio": 0}),
    "--mm-processor-cache-gb": "0",  # vLLM is given what the processor has made,
    "--no-mm-device-do-normalize": "",  # which is normalised already
}


@dataclass(frozen=True)
class ServerRequirements:
    """
    Args:
        model: folder or name of the base model.
        dtype: of the server's forward, such as "bfloat16".
        longest: tokens of a prompt and its completion; the least a server's context may be.
        context: the context to start one with.
        logprobs_modes: those that give behavior log-probs, the preferred one first.
        max_lora_rank: of the adapters it will be sent; 0 sends whole weights.
        max_loras: adapters it must hold at a time.
        transfer: the backend that whole weights come by, or `None` for a checkpoint on disk.
        batch_invariant: a sequence's bits must not depend on what else is decoded.
        counts_tokens: it must say how many tokens each request has, by `a3po_server.py`.
        images: prompts may have images, which it must take by `a3po_images.py`.
        options: further options of the command.
        shape: numbers of the model's configuration, by name, by which it is told from others.
    """

    model: str
    dtype: str
    longest: int
    context: int
    logprobs_modes: tuple[str, ...]
    max_lora_rank: int = 0
    max_loras: int = 0
    transfer: str | None = None
    batch_invariant: bool = False
    counts_tokens: bool = False
    images: bool = False
    options: dict[str, str] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)

    def command(self, url: str) -> str:
        """The shell command that starts the server of `url` right, on the address of `url` alone: its endpoints load
        weights, and trust who calls."""
        address = urlsplit(url)
        host = "127.0.0.1" if address.hostname in (None, "localhost") else address.hostname
        where = ["--host", host, *(["--port", str(address.port)] if address.port else [])]
        variables = " ".join(f"{name}={value}" for name, value in server_environment(self).items())
        return f"{variables} {shlex.join(['vllm', 'serve', *server_arguments(self), *where])}"


def check_server(url: str, info: ServerInfo, requirements: ServerRequirements) -> None:
    """Raise `EngineError` for a server that cannot serve the run, naming all that is missing."""
    missing = [*_version(info, requirements), *_model(info, requirements)]
    missing += _settings(info, requirements) if info.dev_mode else _no_dev_mode()
    if info.max_model_len < requirements.longest:
        missing.append(
            f"its context is {info.max_model_len} tokens, but a prompt and its completion take up to "
            f"{requirements.longest}"
        )
    if missing:
        raise EngineError(
            f"The vLLM server at {url} cannot serve this run: {'; '.join(missing)}. Start it with:\n\n    "
            f"{requirements.command(url)}\n"
        )


def server_arguments(requirements: ServerRequirements) -> list[str]:
    """The options of `vllm serve` that the run needs, the model first."""
    options = {
        "--dtype": requirements.dtype,
        "--max-model-len": str(requirements.context),
        "--logprobs-mode": requirements.logprobs_modes[0],
        "--generation-config": "vllm",
        **requirements.options,
    }
    if requirements.max_lora_rank:
        options |= {
            "--enable-lora": "",
            "--max-lora-rank": str(rank_option(requirements.max_lora_rank)),
            "--max-loras": str(requirements.max_loras),
        }
    if requirements.images:
        options |= _IMAGE_OPTIONS
    if requirements.transfer:
        options["--weight-transfer-config"] = json.dumps({"backend": requirements.transfer})
    extensions = [("--middleware", name) for name in _middleware(requirements)]
    return [requirements.model, *(word for option in (*options.items(), *extensions) for word in option if word)]


def server_environment(requirements: ServerRequirements) -> dict[str, str]:
    """Environment variables that the run needs the server to have."""
    adapters = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if requirements.max_lora_rank else {}
    invariant = {"VLLM_BATCH_INVARIANT": "1"} if requirements.batch_invariant else {}
    extension = {"PYTHONPATH": str(EXTENSION.parent)} if _middleware(requirements) else {}
    return {"VLLM_SERVER_DEV_MODE": "1", **extension, **adapters, **invariant}


def _middleware(requirements: ServerRequirements) -> list[str]:
    """The extensions that the run needs, from the files in the folder of `EXTENSION`."""
    needed = {"a3po_server.TokenCounts": requirements.counts_tokens, "a3po_images.Images": requirements.images}
    return [name for name, is_needed in needed.items() if is_needed]


def _version(info: ServerInfo, requirements: ServerRequirements) -> list[str]:
    oldest = OLDEST_WITH_IMAGES if requirements.images else OLDEST
    try:
        release = Version(info.version).release[:2]
    except InvalidVersion:
        return []  # a build of one's own: what it can do is checked below
    if Version(oldest).release <= release <= Version(NEWEST).release or release < (0, 10):
        return []  # builds from source may call themselves 0.1
    if requirements.images:
        return [f"it is vLLM {info.version}, and prompts with images need {oldest}"]
    return [f"it is vLLM {info.version}, and {oldest} to {NEWEST} are supported"]


def _model(info: ServerInfo, requirements: ServerRequirements) -> list[str]:
    served = served_config(info.serves)
    for name, ours in requirements.shape.items():
        if served.get(name, ours) != ours:
            return [f"it serves {info.serves!r}, whose {name} is {served[name]}, but the trained model's is {ours}"]
    return []


def served_config(serves: str) -> Mapping[str, Any]:
    """The configuration of a server's model, where this machine has it too; empty otherwise."""
    file = Path(serves) / "config.json"
    if not file.is_file():
        try:
            cached = try_to_load_from_cache(serves, "config.json")
        except HFValidationError:  # a folder of another machine
            return {}
        if not isinstance(cached, str):
            return {}
        file = Path(cached)
    config: dict[str, Any] = json.loads(file.read_text())
    return config


def _no_dev_mode() -> list[str]:
    return ["it lacks the endpoints that change weights, which VLLM_SERVER_DEV_MODE=1 opens"]


def _settings(info: ServerInfo, requirements: ServerRequirements) -> list[str]:
    missing = []
    if info.logprobs_mode not in requirements.logprobs_modes:
        missing.append(
            f"its --logprobs-mode is {info.logprobs_mode}, which at this temperature and with these filters is not "
            f"the log-prob that a token was sampled with: {' or '.join(requirements.logprobs_modes)} is"
        )
    if requirements.batch_invariant and not info.batch_invariant:
        missing.append(
            "what it samples depends on what else it decodes, which deterministic=True rules out and "
            "VLLM_BATCH_INVARIANT=1 prevents"
        )
    if requirements.images and info.no_images is not None:
        missing.append(f"its prompts cannot have images: {info.no_images.removesuffix('.')}")
    if requirements.max_lora_rank:
        return missing + _adapters(info, requirements)
    if requirements.counts_tokens and not info.counts_tokens:
        missing.append(
            "it does not say how many tokens each request has, which kv_on_publish='keep' needs: the extension "
            f"{EXTENSION.name} does, which PYTHONPATH has to reach on the server's machine; or set "
            "kv_on_publish='recompute'"
        )
    if info.max_loras:
        missing.append(
            "it was started with --enable-lora, which renames its weights so that whole ones cannot be loaded: one "
            "server takes adapters or whole weights"
        )
    if requirements.transfer and info.transfer != requirements.transfer:
        missing.append(f"its --weight-transfer-config has the backend {info.transfer}, not {requirements.transfer}")
    return missing


def _adapters(info: ServerInfo, requirements: ServerRequirements) -> list[str]:
    if not info.max_loras:
        return ["it was started without --enable-lora, and adapters are published to it"]
    missing = []
    if not info.loads_adapters:
        missing.append("it cannot load adapters while it runs, which VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 allows")
    if info.max_lora_rank < requirements.max_lora_rank:
        missing.append(f"its --max-lora-rank={info.max_lora_rank} is below the adapter's {requirements.max_lora_rank}")
    if info.max_loras < requirements.max_loras:
        missing.append(
            f"its --max-loras={info.max_loras} is below max_staleness + 2 = {requirements.max_loras}: rollouts of "
            "that many versions may be in progress at the same time"
        )
    return missing
