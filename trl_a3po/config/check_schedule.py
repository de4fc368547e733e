"""What a schedule can be combined with, before and after the trainer is built.

Guarantees: a schedule that passes can fill every batch within `max_staleness`; `"periodic"` trains what `"sync"`
would, whichever groups meet in a micro-step; `"fixed_lag"` finds a policy of exactly its age.
"""

import math
from typing import TYPE_CHECKING

from trl_a3po.rollout.take_plan import starves
from trl_a3po.step_normalizer import STEP_NORMALIZED_LOSS_TYPES

if TYPE_CHECKING:
    from trl_a3po.config.a3po_config import A3POConfig


def check_schedule(config: "A3POConfig") -> None:
    """Raise `ValueError` for a schedule that these settings break, or with which no batch could ever be filled."""
    if config.schedule == "periodic":
        _check_sum_of_groups(config)
    if config.schedule == "fixed_lag":
        _check_fixed_lag(config)
    steps = config.optimizer_steps_per_generation
    if starves(config.weight_sync_steps, steps, config.staleness_bound):
        bound = f"max_staleness={config.max_staleness}" if config.schedule != "sync" else "schedule='sync'"
        needed = config.weight_sync_steps - math.gcd(config.weight_sync_steps, steps)
        raise ValueError(
            f"weight_sync_steps={config.weight_sync_steps} with {steps} optimizer steps a generation batch and "
            f"{bound} can never fill a batch, because the engine's weights would be older than allowed: set "
            f"weight_sync_steps={steps}, or max_staleness={needed} or more."
        )


def check_periodic(config: "A3POConfig", *, deepspeed: bool, aux_loss: float) -> None:
    """Raise `ValueError` for what would make `schedule="periodic"` train something else than `schedule="sync"`: a
    backward that steps the optimizer before the gradients are scaled, and a loss of the micro-batch as a whole, whose
    coefficient is `aux_loss`."""
    if config.schedule != "periodic" or config.gradient_accumulation_steps == 1:
        return
    if deepspeed and config.loss_type in STEP_NORMALIZED_LOSS_TYPES:
        raise ValueError(
            f"schedule='periodic' with loss_type={config.loss_type!r} scales the gradients once the period's tokens "
            "are known, which DeepSpeed's backward leaves no room for: set loss_type='dr_grpo' or 'grpo', or launch "
            "without DeepSpeed."
        )
    if aux_loss:
        raise ValueError(
            f"schedule='periodic' with router_aux_loss_coef={aux_loss!r} would train a loss that "
            "depends on which groups meet in a micro-step: set router_aux_loss_coef=0.0, or schedule='sync'."
        )


def _check_fixed_lag(config: "A3POConfig") -> None:
    if config.drop_zero_variance_groups:
        raise ValueError(
            "drop_zero_variance_groups=True with schedule='fixed_lag' cannot replace a group: its batch is "
            "sampled as one: set drop_zero_variance_groups=False or schedule='async'."
        )
    micro_steps = config.micro_steps_per_generation
    steps, rest = divmod(micro_steps, config.gradient_accumulation_steps)
    if rest:
        raise ValueError(
            f"schedule='fixed_lag' needs whole optimizer steps a generation batch, but {micro_steps} micro-steps "
            f"with gradient_accumulation_steps={config.gradient_accumulation_steps} are not: set "
            "steps_per_generation to a multiple of gradient_accumulation_steps."
        )
    if config.max_staleness % steps:
        raise ValueError(
            f"schedule='fixed_lag' with {steps} optimizer steps a generation batch has policies every {steps} "
            f"steps, and none max_staleness={config.max_staleness} steps before a batch: set max_staleness to a "
            f"multiple of {steps}."
        )
    if config.weight_sync_steps > steps:
        raise ValueError(
            f"schedule='fixed_lag' publishes for every generation batch, which weight_sync_steps="
            f"{config.weight_sync_steps} would skip: set weight_sync_steps={steps}."
        )


def _check_sum_of_groups(config: "A3POConfig") -> None:
    """What keeps a period's gradient a sum over its groups, whichever of them meet in a micro-step, or raise."""
    accumulation = config.gradient_accumulation_steps
    one_step = f"one optimizer step a period (gradient_accumulation_steps={accumulation})"
    early = "advantages that are known when a group is finished"
    sum_of_groups = "a loss that does not depend on which groups meet in a micro-step"
    for name, breaks, why, instead in (
        ("num_iterations", config.num_iterations != 1, one_step, 1),
        ("steps_per_generation", config.steps_per_generation != accumulation, one_step, accumulation),
        ("weight_sync_steps", config.weight_sync_steps != 1, "a publish at the start of every period", 1),
        ("scale_rewards", config.scale_rewards == "batch", early, "group"),
        (
            "multi_objective_aggregation",
            config.multi_objective_aggregation == "normalize_then_sum",
            early,
            "sum_then_normalize",
        ),
        ("loss_type", config.loss_type == "bnpo", sum_of_groups, "dapo"),
        ("top_entropy_quantile", config.top_entropy_quantile < 1, sum_of_groups, 1.0),
        ("entropy_coef", config.entropy_coef != 0, sum_of_groups, 0.0),
        ("use_adaptive_entropy", config.use_adaptive_entropy, sum_of_groups, False),
    ):
        if breaks:
            raise ValueError(
                f"schedule='periodic' needs {why}, which {name}={getattr(config, name)!r} breaks: set "
                f"{name}={instead!r}, or schedule='sync'."
            )
    rows = config.completions_per_micro_step
    if rows % config.num_generations:
        raise ValueError(
            f"schedule='periodic' trains whole groups in each micro-step, but the {rows} completions that "
            f"per_device_train_batch_size={config.per_device_train_batch_size} makes of it on all processes are not "
            f"a multiple of num_generations={config.num_generations}: set per_device_train_batch_size so that they "
            "are."
        )
