"""What a configuration resolves to, in words and numbers, before anything is started.

Guarantees: pure functions of the configuration and of the model's shape; every number is the one the run will use,
except for the memory, which is an estimate that leaves out activations.
"""

from dataclasses import dataclass

from torch import nn

from trl_a3po.config import A3POConfig
from trl_a3po.publish.parts import full_shape

GIB = 2**30
ADAM_STATES = 2
FP32_BYTES = 4


def config_plan(args: A3POConfig) -> str:
    """The plan as far as the configuration alone decides it."""
    groups = args.groups_per_batch
    steps = args.optimizer_steps_per_generation
    bound = args.staleness_bound
    ahead = bound // steps
    engine = args.engine if isinstance(args.engine, str) else type(args.engine).__name__
    if args.engine == "vllm":
        engine = f"vllm on {', '.join(args.vllm_server_urls or ()) or 'a server started for the run'}"
    lines = {
        "generation batch": f"{groups} prompts x {args.num_generations} completions (B = {groups})",
        "optimizer steps a batch": f"K = {steps}"
        + (f" ({args.num_iterations} iterations)" if args.num_iterations > 1 else ""),
        "schedule": f"{args.schedule}, {'at most' if args.lag is None else 'exactly'} {bound} optimizer steps stale",
        "generated ahead": f"up to {ahead} batches ({ahead * groups} prompts) besides the one in training"
        if args.schedule != "periodic"
        else f"nothing; a batch is trained {groups // args.takes_per_generation} finished prompts at a time",
        "weights published": "at the start of every batch"
        if args.lag is not None or args.schedule == "periodic"
        else f"when {args.weight_sync_steps} optimizer steps old, at the start of a batch",
        "objective": f"{args.objective}, {_objective_detail(args)}, loss_type {args.loss_type}",
        "engine": f"{engine}, {args.engine_slots or 'automatic'} slots, kv_on_publish {args.kv_on_publish}"
        + (", deterministic" if args.deterministic else ""),
        "completions": f"at most {args.max_completion_length} tokens at temperature {args.temperature:g}",
        "rewards": _rewards_detail(args),
        "longest silent wait": f"{args.stall_timeout:g} s",
    }
    return _table(lines)


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
    return f"{config_plan(args)}\n{_table(lines)}"


def cache_numbers_per_token(config) -> int:
    """Numbers a decoder keeps for one token: keys and values of every layer."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim


def _objective_detail(args: A3POConfig) -> str:
    match args.objective:
        case "decoupled":
            cap = (
                "no cap"
                if args.behavior_weight_mode == "none"
                else f"{args.behavior_weight_mode} at {args.behavior_weight_cap:g}"
            )
            return f"proximal policy {args.proximal_method}, behavior weight per {args.behavior_weight_level}: {cap}"
        case "asympo":
            return f"scale at least {args.asympo_min_scale:g}"
        case "spo":
            return f"negative advantages x {args.spo_negative_scale:g}"
        case "masked_is":
            kept = f"{args.masked_is_lower:g} to {args.masked_is_upper:g}"
            return f"proximal policy {args.proximal_method}, weights {kept}"
        case "aipo":
            return f"behavior ratio at most {args.aipo_cap:g}"
        case "m2po":
            return f"second moment at most {args.m2po_threshold:g}"
    raise NotImplementedError(f"objective={args.objective!r} has no line in the plan yet: give it a case here.")


def _rewards_detail(args: A3POConfig) -> str:
    where = f"in {args.reward_workers} processes" if args.reward_workers else "in a thread"
    limit = "without a limit" if args.reward_timeout is None else f"at most {args.reward_timeout:g} s a group"
    dropped = ", groups of equal rewards replaced" if args.drop_zero_variance_groups else ""
    return f"{where}, {limit}{dropped}"


def _table(lines: dict[str, str]) -> str:
    return "\n".join(f"{name + ':':<25}{value}" for name, value in lines.items())


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
