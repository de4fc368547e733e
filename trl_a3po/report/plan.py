"""What a run resolves to, in words and numbers, before anything is started: the plan of its configuration, with the
model's memory.

Guarantees: pure functions; the memory is an estimate that leaves out activations.
"""

from dataclasses import dataclass

from torch import nn

from trl_a3po.config import A3POConfig
from trl_a3po.config.plan import config_plan, table
from trl_a3po.publish.update_parts import full_shape

GIB = 2**30
ADAM_STATES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class Shares:
    """Over how many processes each part of the trainer's memory is spread."""

    weights: int = 1
    gradients: int = 1
    states: int = 1

    @classmethod
    def of(cls, processes: int, zero_stage: int) -> "Shares":
        """ZeRO-1 spreads the optimizer's states, ZeRO-2 the gradients too, ZeRO-3 also the weights."""
        return cls(*(processes if zero_stage >= stage else 1 for stage in (3, 2, 1)))


def trainer_plan(
    args: A3POConfig,
    model: nn.Module,
    slots: int,
    engine_bytes: int,
    forward: str,
    processes: int = 1,
    zero_stage: int = 0,
) -> str:
    """The plan with the training forward and the model's memory.

    Args:
        model: the unwrapped policy.
        slots: completions the engine decodes at a time.
        engine_bytes: bytes of one number in the engine.
        forward: how training forwards run, in words.
        processes: those that train; the memory is that of each.
        zero_stage: of DeepSpeed, 0 without.
    """
    shares = Shares.of(processes, zero_stage)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(full_shape(p).numel() * p.element_size() for p in model.parameters()) // shares.weights
    gradients = sum(full_shape(p).numel() * p.element_size() for p in trained) // shares.gradients
    states = ADAM_STATES * FP32_BYTES * sum(full_shape(p).numel() for p in trained) // shares.states
    replica = engine_bytes * sum(full_shape(p).numel() for p in model.parameters())
    cache = slots * cache_numbers_per_token(model.config) * args.max_completion_length * engine_bytes
    spread = f"ZeRO-{zero_stage}" if zero_stage else "data parallel" if processes > 1 else "one process"
    lines = {
        "training forward": forward,
        "trainers": f"{processes}, {spread}; the queue and the engine belong to the first"
        if processes > 1
        else spread,
        "trainer memory": f"{_gib(weights + gradients + states)} (weights {_gib(weights)}, gradients "
        f"{_gib(gradients)}, Adam {_gib(states)}), and activations",
    }
    if args.engine != "vllm":  # which takes the share of a GPU that it was given
        lines["engine memory"] = (
            f"{_gib(2 * replica + cache)} (replica {_gib(replica)}, published copy {_gib(replica)}, "
            f"cache of {slots} completions {_gib(cache)}), and the cache of their prompts"
        )
    return f"{config_plan(args)}\n{table(lines)}"


def cache_numbers_per_token(config) -> int:
    """Numbers a decoder keeps for one token: keys and values of every layer."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
