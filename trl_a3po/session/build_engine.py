"""The engine that a run's settings ask for: which one, how large, in which dtype, sampling what.

Guarantees: the settings of `GRPOConfig` reach the engine with their meaning, or are refused.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig

from trl_a3po.config import A3POConfig
from trl_a3po.engines.several import SeveralEngines
from trl_a3po.engines.transformers.transformers_engine import TransformersEngine
from trl_a3po.engines.vllm.vllm_engine import VLLMEngine
from trl_a3po.engines.vllm.weight_route import same_gpu
from trl_a3po.protocol.engine import Engine, SamplingSettings
from trl_a3po.session.cores import engine_threads

MOST_SLOTS = 64
GENERATION_KWARGS = {"min_new_tokens", "suppress_tokens", "eos_token_id"}


def build_engine(args: A3POConfig, device: torch.device) -> Engine:
    if not isinstance(args.engine, str):
        return args.engine
    if args.engine == "vllm":
        return _vllm_engine(args, device)
    devices = [torch.device(name) for name in args.engine_devices] or [device]
    engines = [
        TransformersEngine(
            slots=-(-engine_slots(args) // len(devices)),
            kv_on_publish=args.kv_on_publish,
            deterministic=args.deterministic,
            max_prompt_tokens=args.engine_max_prompt_tokens,
            device=on,
            threads=engine_threads(args),
            max_restarts=args.engine_restarts,
        )
        for on in devices
    ]
    return engines[0] if len(engines) == 1 else SeveralEngines(engines)


def engine_slots(args: A3POConfig) -> int:
    """Completions decoded at a time, on all devices of the engine together."""
    return args.engine_slots or min(args.generation_batch_size, MOST_SLOTS * max(1, len(args.engine_devices)))


def groups_in_engine(args: A3POConfig) -> int | None:
    """Groups handed to the engine at a time: what fills its slots and two more to refill them at once. The others are
    submitted later, under newer weights, and leave a straggler room to be overtaken. All of them where there are no
    newer weights to wait for."""
    if args.engine != "transformers" or args.lag is not None or args.schedule == "periodic":
        return None
    return -(-engine_slots(args) // args.num_generations) + 2


def engine_dtype(args: A3POConfig, model: nn.Module, mixed_precision: str) -> torch.dtype:
    """The engine's dtype: as set, or that of the trainer's forward."""
    if args.engine_dtype is not None:
        return getattr(torch, args.engine_dtype)
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision, model.dtype)


def sampling_settings(args: A3POConfig, generation_config: GenerationConfig) -> SamplingSettings:
    """What TRL would generate with, for an engine.

    Raises:
        ValueError: `generation_kwargs` holds something the engine does not do, or that has a field of its own.
    """
    unknown = sorted(set(args.generation_kwargs or {}) - GENERATION_KWARGS)
    if unknown:
        raise ValueError(
            f"generation_kwargs holds {', '.join(unknown)}, which the engine does not take from there: set what is a "
            f"field of A3POConfig there, and keep only {', '.join(sorted(GENERATION_KWARGS))} in generation_kwargs."
        )
    stop = generation_config.eos_token_id
    return SamplingSettings(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=tuple(
            token for token in ([stop] if isinstance(stop, int) else stop or ()) if token is not None
        ),
        suppress_token_ids=tuple(generation_config.suppress_tokens or ()),
        min_new_tokens=generation_config.min_new_tokens or 0,
        pad_token_id=generation_config.pad_token_id,
        seed=args.seed,
    )


def _vllm_engine(args: A3POConfig, device: torch.device) -> VLLMEngine:
    here = sys.executable if importlib.util.find_spec("vllm") else None
    on = torch.device(args.engine_devices[0]) if args.engine_devices else device
    return VLLMEngine(
        args.vllm_server_urls or (),
        folder=Path(args.vllm_weights_dir or Path(args.output_dir) / "vllm"),
        kv_on_publish=args.kv_on_publish,
        kept_versions=args.staleness_bound + 2,
        transfer=args.vllm_weight_transfer,
        trainer_device=device,
        deterministic=args.deterministic,
        max_prompt_tokens=args.engine_max_prompt_tokens,
        context=args.vllm_max_model_length,
        python=args.vllm_python or here,
        device=on,
        gpu_memory=args.vllm_gpu_memory_utilization if same_gpu(on, device) else 0.9,
        slots=args.engine_slots,
        threads=args.engine_threads,
        max_restarts=args.engine_restarts,
        # A server of its own has to load first.
        start_timeout=args.vllm_server_timeout if args.vllm_server_urls else max(args.vllm_server_timeout, 600.0),
        request_timeout=args.stall_timeout,
        outage_timeout=args.vllm_outage_timeout,
    )
