"""`VLLMEngine`: samples with vLLM in a worker process of ours, without a server.

Guarantees, beside those of `worker_engine.py`: a publish happens between two steps of vLLM, and every sequence goes on
under the new weights from its next token; on a GPU, weights never leave the device's memory or go straight to it.
"""

import copy
import os
import pickle
import shutil
import sys
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import torch

from trl_a3po.engines.vllm.adapter_support import adapter_obstacle, rank_option
from trl_a3po.engines.vllm.process.vllm_worker import Setup
from trl_a3po.engines.vllm.weight_names import has_nested_tower
from trl_a3po.engines.worker_engine import WorkerEngine
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate

WORKER = "trl_a3po.engines.vllm.process.vllm_worker"
NO_VLLM = (
    "engine='vllm' without vllm_server_urls runs vLLM in a process of its own, and vLLM is not installed here: pip "
    "install vllm, set vllm_python to an interpreter that has it, or set vllm_server_urls to running servers."
)
_IMAGE_OPTIONS: dict[str, Any] = {
    "limit_mm_per_prompt": {"video": 0, "audio": 0},
    "mm_processor_cache_gb": 0,  # vLLM is given what the processor has made,
    "mm_device_do_normalize": False,  # which is normalised already
}


class VLLMEngine(WorkerEngine):
    """An `Engine` whose worker steps vLLM's engine core.

    Args:
        slots: rollouts decoded at a time.
        python: an interpreter that has vLLM; `None` if there is none, which `start` reports.
        kv_on_publish: what happens to sequences in flight when weights change: "keep" their cache or "recompute" it.
        deterministic: what is sampled depends on the seed, the request and the weights alone; needs a GPU of compute
            capability 8.0 or higher.
        max_prompt_tokens: longest prompt accepted; `None` leaves that to the context.
        context: tokens of a sequence; `None`: the model's, or what `max_prompt_tokens` needs.
        processor: that of a vision-language model, which `save_pretrained` writes, with its tokenizer; `None`: there
            are no images.
        device: the device of the replica, such as "cpu" or "cuda:1".
        other_devices: of a replica that is spread over several devices by tensor parallelism, those but the first.
        gpu_memory: the share of a GPU's memory that vLLM takes.
        options: further options of vLLM's `EngineArgs`.
        worker: what is waited for, as `WorkerEngine` takes it.
    """

    def __init__(
        self,
        *,
        slots: int,
        python: str | None,
        kv_on_publish: Literal["keep", "recompute"] = "keep",
        deterministic: bool = False,
        max_prompt_tokens: int | None = None,
        context: int | None = None,
        processor: Any | None = None,
        device: torch.device | str = "cpu",
        other_devices: Sequence[torch.device | str] = (),
        gpu_memory: float = 0.9,
        options: dict[str, Any] | None = None,
        **worker: Any,
    ):
        device = torch.device(device)
        devices = [device, *map(torch.device, other_devices)]
        variables = worker_variables(devices, deterministic=deterministic)
        # Beside a part of a replica, a GPU has hardly room for all of its weights.
        staged_on = torch.device("cpu") if other_devices else None
        super().__init__(WORKER, device=device, staged_on=staged_on, python=python, variables=variables, **worker)
        self._python = python
        self._ranks = len(devices)
        self._slots = slots
        self._recompute = kv_on_publish == "recompute"
        self._deterministic = deterministic
        self._max_prompt_tokens = max_prompt_tokens
        self._context = context
        self._processor = processor
        self._options = {"gpu_memory_utilization": gpu_memory} if device.type == "cuda" else {"enforce_eager": True}
        self._options |= options or {}
        self._folder = ""

    def start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        """See `Engine.start`. Raises `ValueError` for an adapter that vLLM does not serve, and for a model that its
        devices cannot share."""
        heads = getattr(spec.config.get_text_config(), "num_attention_heads", self._ranks)
        if heads % self._ranks:
            raise ValueError(
                f"vllm_tensor_parallel_size={self._ranks} cannot hold, because every GPU takes the same number of the "
                f"model's {heads} attention heads: set it to a divisor of {heads}."
            )
        if spec.peft_config is not None and (obstacle := adapter_obstacle(spec.peft_config, _trained(update))):
            raise ValueError(f"vLLM cannot serve this adapter, because {obstacle}: set lora_sync='merged'.")
        super().start(spec, sampling, update)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def worker_payload(self, spec: PolicySpec, sampling: SamplingSettings) -> bytes:
        if self._python is None:
            raise EngineError(NO_VLLM)
        self._folder = tempfile.mkdtemp(prefix="a3po-vllm-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        config, tied = _served_config(spec, unties=self._device.type == "cpu")
        config.save_pretrained(self._folder)
        if self._processor is not None:
            self._processor.save_pretrained(self._folder)
        text = spec.config.get_text_config()
        context = sequence_length(
            self._context,
            self._max_prompt_tokens,
            sampling.max_new_tokens,
            getattr(text, "max_position_embeddings", None),
        )
        options = {
            "model": self._folder,
            "skip_tokenizer_init": self._processor is None,
            "generation_config": "vllm",
            "dtype": str(spec.dtype).removeprefix("torch."),
            "max_model_len": context,
            "max_num_seqs": self._slots + 1,  # one for scores
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            # Several engines of a run draw different noise.
            "seed": zlib.crc32(f"{sampling.seed} {self._device}".encode()),
            **(_IMAGE_OPTIONS if self._processor is not None else {}),
            **({"tensor_parallel_size": self._ranks, "distributed_executor_backend": "mp"} if self._ranks > 1 else {}),
            **self._options,
        }
        if spec.peft_config is not None:
            rank = rank_option(spec.peft_config.r)
            options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 1}
        decoder = {
            "slots": self._slots,
            "context": context,
            "max_prompt_tokens": self._max_prompt_tokens or context - sampling.max_new_tokens,
            "vocab_size": text.vocab_size,
            "recompute": self._recompute,
            "seeds": self._deterministic,
        }
        adapter = None if spec.peft_config is None else _plain(spec.peft_config)
        setup = Setup(
            sampling,
            options,
            decoder,
            tied,
            adapter,
            spec.adapter_name,
            self._folder,
            self._threads,
            images=self._processor is not None,
            nested_tower=has_nested_tower(config),
            ranks=self._ranks,
            interpreter=f"vllm_python={None if self._python == sys.executable else self._python!r}",
        )
        return pickle.dumps(setup)


def sequence_length(asked: int | None, prompt: int | None, new_tokens: int, model_has: int | None) -> int:
    """Tokens of a sequence in vLLM. One more than a prompt and its completion, where the model allows it, so that
    they can be scored.

    Raises:
        ValueError: nothing says how long a sequence may be.
    """
    longest = (prompt or 1) + new_tokens
    if model_has is None:
        if asked is None and prompt is None:
            raise ValueError(
                "The model's configuration has no max_position_embeddings, which would say how many tokens vLLM has "
                "to hold for a sequence: set vllm_max_model_length or engine_max_prompt_tokens."
            )
        return max(longest, asked or 0) + 1
    longest = min(longest, model_has)  # a completion ends where the context ends
    length = asked if asked is not None else model_has if prompt is None else longest
    return min(max(longest, length) + 1, max(model_has, longest))


def worker_variables(devices: Sequence[torch.device], *, deterministic: bool) -> dict[str, str]:
    """Environment variables of the worker, whose replica is on `devices`."""
    (kind,) = {device.type for device in devices}
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core belongs into the worker itself
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # its log-probs are not where `vllm_core.py` expects them
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if deterministic:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    if len(devices) > 1:
        variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if kind == "cpu":
        variables["TORCHDYNAMO_DISABLE"] = "1"  # compiling parts of the sampler takes a minute and gains nothing
        for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")):
            variables[name] = os.environ.get(name, value)
    if kind == "cuda":
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(_physical, devices))
    return variables


def _physical(device: torch.device) -> str:
    """The number of `device` in `CUDA_VISIBLE_DEVICES` of a process that is to see it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)


def _served_config(spec: PolicySpec, *, unties: bool) -> tuple[Any, dict[str, str]]:
    """The configuration that vLLM builds the model from, and which of its weights share another's.

    Args:
        unties: tied weights become weights of their own. Loading weights anew, vLLM's build for CPUs does not notice
            that an output layer shares the embeddings.
    """
    config = copy.deepcopy(spec.config)
    config.dtype = spec.dtype
    config.architectures = [spec.model_class.__name__]
    if not unties or not config.tie_word_embeddings:
        return config, {}
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    model_class: Any = spec.model_class
    return config, dict(model_class._tied_weights_keys or {})


def _plain(peft_config: Any) -> dict[str, Any]:
    """An adapter's configuration as a saved adapter has it."""
    values = peft_config.to_dict() | {"inference_mode": True, "peft_type": "LORA"}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


def _trained(update: WeightUpdate) -> set[str]:
    return {name for name in update.specs if ".lora_" in name}
