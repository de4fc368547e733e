"""What a run needs of a vLLM server, checked before anything is sampled, and the command that starts one right.

Guarantees: pure functions; everything that is missing is named at once, with that command.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from packaging.version import InvalidVersion, Version

from trl_a3po.engines.vllm.server import Facts
from trl_a3po.errors import EngineError

OLDEST, NEWEST = "0.22", "0.31"


@dataclass(frozen=True)
class Needs:
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
    options: dict[str, str] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)

    def started_here(self, folder: str, options: dict[str, str]) -> "Needs":
        """Those of a server that serves the model in `folder` and sees no tokenizer."""
        return replace(self, model=folder, options={"--skip-tokenizer-init": "", **options})

    def command(self, url: str) -> str:
        """The shell command that starts the server of `url` right."""
        port = url.rpartition(":")[2].partition("/")[0]
        where = ["--port", port] if port.isdigit() else []
        variables = " ".join(f"{name}={value}" for name, value in server_environment(self).items())
        return f"{variables} {shlex.join(['vllm', 'serve', *server_arguments(self), *where])}"


def check_server(url: str, facts: Facts, needs: Needs) -> None:
    """Raise `EngineError` for a server that cannot serve the run, naming all that is missing."""
    missing = [*_version(facts), *_model(facts, needs)]
    missing += _settings(facts, needs) if facts.dev_mode else _no_dev_mode()
    if facts.max_model_len < needs.longest:
        missing.append(
            f"its context is {facts.max_model_len} tokens, but a prompt and its completion take up to {needs.longest}"
        )
    if missing:
        raise EngineError(
            f"The vLLM server at {url} cannot serve this run: {'; '.join(missing)}. Start it with:\n\n    "
            f"{needs.command(url)}\n"
        )


def server_arguments(needs: Needs) -> list[str]:
    """The options of `vllm serve` that the run needs, the model first."""
    options = {
        "--dtype": needs.dtype,
        "--max-model-len": str(needs.context),
        "--logprobs-mode": needs.logprobs_modes[0],
        "--generation-config": "vllm",
        **needs.options,
    }
    if needs.max_lora_rank:
        options |= {
            "--enable-lora": "",
            "--max-lora-rank": str(needs.max_lora_rank),
            "--max-loras": str(needs.max_loras),
        }
    if needs.transfer:
        options["--weight-transfer-config"] = json.dumps({"backend": needs.transfer})
    return [needs.model, *(word for option in options.items() for word in option if word)]


def server_environment(needs: Needs) -> dict[str, str]:
    """Environment variables that the run needs the server to have."""
    adapters = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if needs.max_lora_rank else {}
    handles = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if needs.transfer == "ipc" else {}
    invariant = {"VLLM_BATCH_INVARIANT": "1"} if needs.batch_invariant else {}
    return {"VLLM_SERVER_DEV_MODE": "1", **adapters, **handles, **invariant}


def _version(facts: Facts) -> list[str]:
    try:
        release = Version(facts.version).release[:2]
    except InvalidVersion:
        return []  # a build of one's own: what it can do is checked below
    if Version(OLDEST).release <= release <= Version(NEWEST).release or release < (0, 10):
        return []  # builds from source may call themselves 0.1
    return [f"it is vLLM {facts.version}, and {OLDEST} to {NEWEST} are supported"]


def _model(facts: Facts, needs: Needs) -> list[str]:
    served = served_config(facts.serves)
    for name, ours in needs.shape.items():
        if served.get(name, ours) != ours:
            return [f"it serves {facts.serves!r}, whose {name} is {served[name]}, but the trained model's is {ours}"]
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
    return json.loads(file.read_text())


def _no_dev_mode() -> list[str]:
    return ["it lacks the endpoints that change weights, which VLLM_SERVER_DEV_MODE=1 opens"]


def _settings(facts: Facts, needs: Needs) -> list[str]:
    missing = []
    if facts.logprobs_mode not in needs.logprobs_modes:
        missing.append(
            f"its --logprobs-mode is {facts.logprobs_mode}, which at this temperature and with these filters is not "
            f"the log-prob that a token was sampled with: {' or '.join(needs.logprobs_modes)} is"
        )
    if needs.batch_invariant and not facts.batch_invariant:
        missing.append(
            "what it samples depends on what else it decodes, which deterministic=True rules out and "
            "VLLM_BATCH_INVARIANT=1 prevents"
        )
    if needs.max_lora_rank:
        return missing + _adapters(facts, needs)
    if facts.max_loras:
        missing.append(
            "it was started with --enable-lora, which renames its weights so that whole ones cannot be loaded: one "
            "server takes adapters or whole weights"
        )
    if needs.transfer and facts.transfer != needs.transfer:
        missing.append(f"its --weight-transfer-config has the backend {facts.transfer}, not {needs.transfer}")
    if needs.transfer == "ipc" and not facts.reads_handles:
        missing.append("it reads no handles of CUDA IPC, which VLLM_ALLOW_INSECURE_SERIALIZATION=1 allows")
    return missing


def _adapters(facts: Facts, needs: Needs) -> list[str]:
    if not facts.max_loras:
        return ["it was started without --enable-lora, and adapters are published to it"]
    missing = []
    if not facts.loads_adapters:
        missing.append("it cannot load adapters while it runs, which VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 allows")
    if facts.max_lora_rank < needs.max_lora_rank:
        missing.append(f"its --max-lora-rank={facts.max_lora_rank} is below the adapter's {needs.max_lora_rank}")
    if facts.max_loras < needs.max_loras:
        missing.append(
            f"its --max-loras={facts.max_loras} is below max_staleness + 2 = {needs.max_loras}: rollouts of that many "
            "versions may be in work at a time"
        )
    return missing
