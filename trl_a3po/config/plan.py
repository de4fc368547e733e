"""What a configuration resolves to, in words and numbers.

Guarantees: every number is the one the run will use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl_a3po.config.a3po_config import A3POConfig


def config_plan(args: "A3POConfig") -> str:
    """The plan as far as the configuration alone decides it."""
    groups = args.groups_per_batch
    steps = args.optimizer_steps_per_generation
    bound = args.staleness_bound
    ahead = bound // steps
    engine = args.engine if isinstance(args.engine, str) else type(args.engine).__name__
    if args.engine == "vllm":
        engine = (
            f"vllm on {', '.join(args.vllm_server_urls)}" if args.vllm_server_urls else "vllm in a process of its own"
        )
    if args.vllm_tensor_parallel_size > 1:
        engine += f" for each {args.vllm_tensor_parallel_size} GPUs, which hold one replica"
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
        "objective": f"{args.objective}, {args.objective_record.plan(args)}, loss_type {args.loss_type}",
        "engine": f"{engine}, {args.engine_slots or 'automatic'} slots, kv_on_publish {args.kv_on_publish}"
        + (", deterministic" if args.deterministic else ""),
        "completions": f"at most {args.max_completion_length} tokens at temperature {args.temperature:g}",
        "rewards": _rewards_detail(args),
        "longest silent wait": f"{args.stall_timeout:g} s",
    }
    return table(lines)


def table(lines: dict[str, str]) -> str:
    return "\n".join(f"{name + ':':<25}{value}" for name, value in lines.items())


def _rewards_detail(args: "A3POConfig") -> str:
    where = f"in {args.reward_workers} processes" if args.reward_workers else "in a thread"
    limit = "without a limit" if args.reward_timeout is None else f"at most {args.reward_timeout:g} s a group"
    dropped = ", groups of equal rewards replaced" if args.drop_zero_variance_groups else ""
    return f"{where}, {limit}{dropped}"
