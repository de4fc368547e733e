"""The plan of a run in words and numbers, before anything starts: the plan of the configuration, and memory of the
model.

Guarantees: pure functions; the memory is an estimate, and what is not known is named instead of guessed.
"""

import os

from torch import nn
from transformers import PreTrainedModel

from trl_a3po.config import A3POConfig
from trl_a3po.config.plan import config_plan, table
from trl_a3po.models.memory import GIB
from trl_a3po.report.memory import EngineMemory, TrainerMemory


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
    *,
    fsdp: bool = False,
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
        fsdp: launched with FSDP2.
    """
    memory = TrainerMemory.of(args, model, processes, zero_stage, optimizer, fsdp=fsdp)
    engine = EngineMemory.of(args, model, slots, engine_bytes)
    spread = "FSDP2" if fsdp else f"ZeRO-{zero_stage}" if zero_stage else ""
    layout = spread or ("data parallel" if processes > 1 else "one process")
    lines = {
        "training forward": forward,
        "trainers": f"{processes}, {layout}; the queue and the engine belong to the first"
        if processes > 1
        else layout,
        "trainer memory": f"{_gib(memory.held)} (weights {_gib(memory.weights)}, gradients {_gib(memory.gradients)}, "
        f"{_states(memory.states, args.optim if optimizer is None else optimizer)})",
        "activations": f"about {_gib(memory.activations)} more in a micro-batch of "
        f"{args.per_device_train_batch_size} completions of {args.max_completion_length} tokens, without prompts",
    }
    if args.engine == "vllm" and not args.vllm_server_urls:
        parts = args.vllm_tensor_parallel_size
        part, host = ("a part of ", " of the machine's memory") if parts > 1 else ("", "")
        lines["engine memory"] = (
            f"{_vllm_share(args)} (with {part}the replica, {_gib(engine.replica // parts)}), and the published copy, "
            f"{_gib(engine.replica)}{host}"
        )
    elif args.engine != "vllm":
        saved = f", of which {_gib(shared_bytes)} are the trainer's own frozen weights" if shared_bytes else ""
        lines["engine memory"] = (
            f"{_gib(engine.held - shared_bytes)} (replica {_gib(engine.replica)}{saved}, published copy of what is "
            f"trained {_gib(engine.published)}, cache of {slots} completions {_gib(engine.cache)}), and the cache of "
            "their prompts"
        )
    if args.engine == "transformers" or (args.engine == "vllm" and not args.vllm_server_urls):
        lines["publishing"] = _publishing(args, gathers=fsdp or zero_stage == 3)
    return f"{config_plan(args)}\n{table(lines)}"


def _states(states: int | None, optim: str) -> str:
    return f"{optim} {_gib(states)}" if states is not None else f"and the states of {optim}, which are not known"


def _publishing(args: A3POConfig, *, gathers: bool) -> str:
    if args.device.type == "cuda" and not gathers:
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
