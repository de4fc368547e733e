"""The plan of a run in words and numbers, before anything starts: the plan of the configuration, and memory of the
model.

Guarantees: pure functions; the memory is an estimate, and what is not known is named instead of guessed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from trl_a3po.config import A3POConfig
from trl_a3po.config.plan import config_plan, table
from trl_a3po.models.memory import GIB, LayerShape, optimizer_bytes
from trl_a3po.publish.weight_sources import full_shape


@dataclass(frozen=True)
class MemorySplit:
    """Over how many processes each part of the trainer's memory is partitioned."""

    weights: int = 1
    gradients: int = 1
    optimizer_states: int = 1

    @classmethod
    def of(cls, processes: int, zero_stage: int) -> "MemorySplit":
        """ZeRO-1 partitions the optimizer states, ZeRO-2 also the gradients, ZeRO-3 also the weights."""
        return cls(*(processes if zero_stage >= stage else 1 for stage in (3, 2, 1)))


def trainer_plan(
    args: A3POConfig,
    model: PreTrainedModel | nn.Module,
    slots: int,
    engine_bytes: int,
    forward: str,
    processes: int = 1,
    zero_stage: int = 0,
    shared_bytes: int = 0,
    optimizer: str | None = None,
) -> str:
    """The plan of the configuration, followed by the training forward and the memory of trainer and engine.

    Args:
        model: the unwrapped policy.
        slots: completions that the engine decodes at a time.
        engine_bytes: bytes of one number in the engine.
        forward: how training forwards run, in words.
        processes: number of processes that train; the memory is that of each.
        zero_stage: stage of DeepSpeed ZeRO; 0 without DeepSpeed.
        shared_bytes: of frozen weights of the trainer that the engine reads where they are.
        optimizer: the class of an optimizer that the caller has made; `None` for the one that `optim` names.
    """
    split = MemorySplit.of(processes, zero_stage)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(full_shape(p).numel() * p.element_size() for p in model.parameters()) // split.weights
    gradients = sum(full_shape(p).numel() * p.element_size() for p in trained) // split.gradients
    states = _optimizer_states(args.optim if optimizer is None else optimizer, trained, split, zero_stage > 0)
    replica = engine_bytes * sum(full_shape(p).numel() for p in model.parameters())
    published = engine_bytes * sum(full_shape(p).numel() for p in trained)
    shape = LayerShape.of(model.config)
    cache = slots * shape.kv_values * args.max_completion_length * engine_bytes
    layout = f"ZeRO-{zero_stage}" if zero_stage else "data parallel" if processes > 1 else "one process"
    lines = {
        "training forward": forward,
        "trainers": f"{processes}, {layout}; the queue and the engine belong to the first"
        if processes > 1
        else layout,
        "trainer memory": f"{_gib(weights + gradients + (states or 0))} (weights {_gib(weights)}, gradients "
        f"{_gib(gradients)}, {_states_detail(states, args.optim if optimizer is None else optimizer)})",
        "activations": f"about {_gib(_activations(args, model, shape))} more in a micro-batch of "
        f"{args.per_device_train_batch_size} completions of {args.max_completion_length} tokens, without their prompts",
    }
    if args.engine == "vllm" and not args.vllm_server_urls:
        lines["engine memory"] = (
            f"{_vllm_share(args)} (with the replica, {_gib(replica)}), and the published copy, {_gib(replica)}"
        )
    elif args.engine != "vllm":
        saved = f", of which {_gib(shared_bytes)} are the trainer's own frozen weights" if shared_bytes else ""
        lines["engine memory"] = (
            f"{_gib(replica - shared_bytes + published + cache)} (replica {_gib(replica)}{saved}, published copy of "
            f"what is trained {_gib(published)}, cache of {slots} completions {_gib(cache)}), and the cache of their "
            "prompts"
        )
    if args.engine == "transformers" or (args.engine == "vllm" and not args.vllm_server_urls):
        lines["publishing"] = _publishing(args, zero_stage)
    return f"{config_plan(args)}\n{table(lines)}"


def _optimizer_states(optim: str, trained: Sequence[nn.Parameter], split: MemorySplit, deepspeed: bool) -> int | None:
    """Bytes of the optimizer's states in each process, `None` if they are not known."""
    sizes = [(full_shape(p).numel(), optimizer_bytes(optim, p.element_size(), deepspeed=deepspeed)) for p in trained]
    if any(each is None for _, each in sizes):
        return None
    return int(sum(numbers * (each or 0.0) for numbers, each in sizes)) // split.optimizer_states


def _states_detail(states: int | None, optim: str) -> str:
    return f"{optim} {_gib(states)}" if states is not None else f"and the states of {optim}, which are not known"


def _activations(args: A3POConfig, model: PreTrainedModel | nn.Module, shape: LayerShape) -> int:
    tokens = args.per_device_train_batch_size * args.max_completion_length
    half = args.bf16 or args.fp16
    size = 2 if half else max(p.element_size() for p in model.parameters())
    return shape.activation_bytes(tokens, size, checkpointing=args.gradient_checkpointing)


def _publishing(args: A3POConfig, zero_stage: int) -> str:
    if args.device.type == "cuda" and zero_stage < 3:
        return "training waits for a copy on its own GPU, which is sent to the engine while training goes on"
    return "training waits until the weights are in memory that the engine reads"


def _vllm_share(args: A3POConfig) -> str:
    """What vLLM takes of the memory of each of its devices."""
    devices = args.engine_devices or [args.device.type]
    if all(name.startswith("cpu") for name in devices):
        return f"VLLM_CPU_KVCACHE_SPACE={os.environ.get('VLLM_CPU_KVCACHE_SPACE', '1')} GiB for the cache"
    return f"{args.vllm_gpu_memory_utilization:.0%} of a GPU that trains too, 90% of another"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
