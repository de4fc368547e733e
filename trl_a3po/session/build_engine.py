"""The engine of a run, built from its settings: which engine, how large, in which dtype.

Guarantees: every setting of `GRPOConfig` keeps its meaning in the engine, or raises.
"""

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin

from trl_a3po.config import A3POConfig
from trl_a3po.engines.several import SeveralEngines
from trl_a3po.engines.transformers.transformers_engine import TransformersEngine
from trl_a3po.engines.vllm.process.vllm_engine import VLLMEngine
from trl_a3po.engines.vllm.servers.vllm_servers import VLLMServers
from trl_a3po.planning.rules import Rules, groups_that_fill
from trl_a3po.planning.simulation import Split
from trl_a3po.protocol.engine import Engine
from trl_a3po.session.cores import engine_threads

MOST_SLOTS = 64
VLLM_START_TIMEOUT = 600.0  # seconds; on a GPU, vLLM compiles for minutes when it starts for the first time
VLLM_SLOTS = 256  # of each replica, unless engine_slots says otherwise


def build_engine(args: A3POConfig, device: torch.device, processing_class: Any = None) -> Engine:
    """The engine that `args` ask for, not yet started; `device` is the trainer's.

    Raises:
        ValueError: `processing_class` is a processor, and weights are to reach servers over NCCL.
    """
    if not isinstance(args.engine, str):
        return args.engine
    processor = processing_class if isinstance(processing_class, ProcessorMixin) else None
    if args.engine == "vllm" and args.vllm_server_urls:
        if processor is not None and args.vllm_weight_transfer == "nccl":
            raise ValueError(
                f"vllm_weight_transfer='nccl' with a {type(processor).__name__}: the weights of a model that sees "
                "images reach servers by disk alone. Set vllm_weight_transfer='disk'; or, for prompts without images, "
                "pass processing_class=processor.tokenizer."
            )
        return _vllm_servers(args, device, images=processor is not None)
    replicas = [[torch.device(name) for name in names] for names in args.engine_replicas] or [[device]]
    build = partial(_vllm_engine, processor=processor) if args.engine == "vllm" else _transformers_engine
    engines = [build(args, on, device, -(-engine_slots(args) // len(replicas))) for on in replicas]
    return engines[0] if len(engines) == 1 else SeveralEngines(engines)


def engine_slots(args: A3POConfig) -> int:
    """How many completions are decoded at a time, on all devices of the engine together."""
    if args.engine == "vllm":
        return args.engine_slots or VLLM_SLOTS * engines_of(args)
    return args.engine_slots or min(args.generation_batch_size, MOST_SLOTS * max(1, len(args.engine_devices)))


def known_slots(args: A3POConfig) -> int | None:
    """As `engine_slots`; `None` where the setting says nothing, because the engine was started elsewhere."""
    elsewhere = not isinstance(args.engine, str) or args.vllm_server_urls
    return args.engine_slots if elsewhere else engine_slots(args)


def engines_of(args: A3POConfig) -> int:
    """How many engines generate: one for each replica or server, and one if no device is named."""
    return len(args.vllm_server_urls or args.engine_replicas) or 1


def queue_rules(args: A3POConfig, *, episodes: bool = False) -> Rules:
    """The rules of the run's queue. While an episode waits for a tool, others use its place in the engine."""
    return Rules.of_config(args, None if episodes else groups_in_engine(args))


def split_of(args: A3POConfig, trainers: int) -> Split:
    """How a run of `trainers` processes shares out its devices."""
    return Split(trainers, engines_of(args), -(-engine_slots(args) // engines_of(args)))


def groups_in_engine(args: A3POConfig) -> int | None:
    """How many groups are submitted to the engine at a time: as many as `groups_that_fill` says. The other groups are
    submitted later, under newer weights, which leaves room to overtake a slow group. `None` submits all groups: either
    there are no newer weights to wait for, or the engine schedules its requests itself."""
    if args.engine != "transformers" or args.lag is not None or args.schedule == "periodic":
        return None
    return groups_that_fill(engine_slots(args), args.num_generations)


def engine_dtype(args: A3POConfig, model: PreTrainedModel, mixed_precision: str) -> torch.dtype:
    """The dtype of the engine: `engine_dtype`, or the dtype of the trainer's forward pass."""
    name = args.engine_dtype or {"bf16": "bfloat16", "fp16": "float16"}.get(mixed_precision)
    dtype: torch.dtype = model.dtype if name is None else getattr(torch, name)
    return dtype


def shares_gpu(args: A3POConfig, on: torch.device, device: torch.device) -> bool:
    """Whether an engine on `on` shares a GPU with a process that trains; `device` is the main process's."""
    if not on.type == device.type == "cuda":
        return False
    current = torch.cuda.current_device()
    trains = [current if device.index is None else device.index, *range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))]
    return (current if on.index is None else on.index) in trains


def shared_with_engine(args: A3POConfig, model: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of the frozen weights of `model` that the engine, which runs in `dtype`, reads where the trainer has
    them on `device`."""
    on = {torch.device(name) for name in args.engine_devices} or {device}
    if args.engine != "transformers" or device.type != "cuda" or device not in on:
        return 0
    frozen = [p for p in model.parameters() if not p.requires_grad and p.dtype == dtype and p.device == device]
    return sum(p.numel() * p.element_size() for p in frozen)


def _transformers_engine(args: A3POConfig, on: list[torch.device], device: torch.device, slots: int) -> Engine:
    (only,) = on
    return TransformersEngine(
        slots=slots,
        kv_on_publish=args.kv_on_publish,
        deterministic=args.deterministic,
        max_prompt_tokens=args.engine_max_prompt_tokens,
        device=only,
        threads=engine_threads(args),
        max_restarts=args.engine_restarts,
    )


def _vllm_engine(
    args: A3POConfig, on: list[torch.device], device: torch.device, slots: int, processor: ProcessorMixin | None
) -> Engine:
    shares = any(shares_gpu(args, one, device) for one in on)
    here = sys.executable if importlib.util.find_spec("vllm") else None
    return VLLMEngine(
        slots=slots,
        python=args.vllm_python or here,
        kv_on_publish=args.kv_on_publish,
        deterministic=args.deterministic,
        max_prompt_tokens=args.engine_max_prompt_tokens,
        context=args.vllm_max_model_length,
        processor=processor,
        device=on[0],
        other_devices=on[1:],
        gpu_memory=args.vllm_gpu_memory_utilization if shares else 0.9,
        options={"model_impl": args.vllm_model_impl},
        threads=args.engine_threads,
        max_restarts=args.engine_restarts,
        start_timeout=max(args.vllm_server_timeout, VLLM_START_TIMEOUT),
    )


def _vllm_servers(args: A3POConfig, device: torch.device, *, images: bool) -> Engine:
    return VLLMServers(
        args.vllm_server_urls or (),
        folder=Path(args.vllm_weights_dir or Path(args.output_dir) / "vllm"),
        kv_on_publish=args.kv_on_publish,
        kept_versions=args.staleness_bound + 2,
        transfer="disk" if images else args.vllm_weight_transfer,
        trainer_device=device,
        deterministic=args.deterministic,
        images=images,
        max_prompt_tokens=args.engine_max_prompt_tokens,
        start_timeout=args.vllm_server_timeout,
        request_timeout=args.stall_timeout,
        outage_timeout=args.vllm_outage_timeout,
    )
