"""What an objective can be combined with: loss types, levels, anchors, the KL term.

Guarantees: with settings that pass, the anchor and the weight that the objective gives to TRL's loss make it the
objective's own; docs/objectives.md shows the same as tables.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl_a3po.config.a3po_config import A3POConfig

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
BALANCED = ("asympo", "spo")
RIVALS = ("masked_is", "aipo", "m2po")
SETTINGS_OF = {
    ("proximal_method",): ("decoupled", "masked_is"),
    ("fresh_proximal", "behavior_weight_cap", "behavior_weight_mode", "behavior_weight_level"): ("decoupled",),
    ("masked_is_lower", "masked_is_upper"): ("masked_is",),
    ("aipo_cap",): ("aipo",),
    ("m2po_threshold",): ("m2po",),
    ("asympo_min_scale",): ("asympo",),
    ("spo_negative_scale",): ("spo",),
}
RIVAL_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


def check_objective(config: "A3POConfig") -> None:
    """Raise `ValueError` for settings with which the loss would be another one than the objective's."""
    if (
        config.behavior_weight_level == "sequence"
        and config.importance_sampling_level != "sequence"
        and config.objective == "decoupled"
    ):
        raise ValueError(
            "behavior_weight_level='sequence' with importance_sampling_level='token' breaks w·r = ρ: set both to "
            "'sequence' or both to 'token'."
        )
    _check_kl(config)
    _check_comparison(config)
    if config.objective == "decoupled":
        _check_decoupled(config)
    elif config.objective in RIVALS:
        _check_rival(config)
    elif config.objective in BALANCED:
        _check_balanced(config)
    else:
        raise NotImplementedError(
            f"objective={config.objective!r} has no rules yet for what it can be combined with: give it a branch here."
        )
    _check_read(config)


def _check_read(config: "A3POConfig") -> None:
    """A setting of another objective would be ignored."""
    for names, objectives in SETTINGS_OF.items():
        for name in names:
            value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
            if config.objective not in objectives and value != default:
                raise ValueError(
                    f"{name}={value!r} is not used by objective={config.objective!r}: leave it out, or set objective="
                    f"{' or '.join(map(repr, objectives))}."
                )


def _check_kl(config: "A3POConfig") -> None:
    """TRL corrects the KL term by `r`; that is the behavior ratio `ρ` only where the anchor is `lb`."""
    if config.beta == 0 or not config.use_bias_correction_kl:
        return
    interpolates = config.proximal_method in ("loglinear", "linear") and config.fresh_proximal == "behavior"
    at_behavior = config.proximal_method == "behavior" or (interpolates and config.staleness_bound <= 1)
    if config.objective != "decoupled" or not at_behavior:
        raise ValueError(
            f"use_bias_correction_kl=True with objective={config.objective!r}, proximal_method="
            f"{config.proximal_method!r} and tokens up to {config.staleness_bound} steps stale multiplies the KL term "
            "by a ratio that is not taken from the behavior policy: set use_bias_correction_kl=False, or "
            "objective='decoupled' with max_staleness=1 or proximal_method='behavior'."
        )


def _check_comparison(config: "A3POConfig") -> None:
    if not config.compare_proximal_every:
        return
    for name, needed in (("objective", "decoupled"), ("proximal_method", "loglinear")):
        if getattr(config, name) != needed:
            raise ValueError(
                f"compare_proximal_every={config.compare_proximal_every} compares the log-linear anchor, which "
                f"{name}={getattr(config, name)!r} does not use: set compare_proximal_every=0, or {name}={needed!r}."
            )
    if config.schedule == "periodic":
        raise ValueError(
            f"compare_proximal_every={config.compare_proximal_every} has nothing to compare with "
            "schedule='periodic', where no token is stale: set compare_proximal_every=0."
        )


def _check_decoupled(config: "A3POConfig") -> None:
    steps = config.optimizer_steps_per_generation
    if config.loss_type not in CLIPPED_LOSS_TYPES:
        raise ValueError(
            f"loss_type={config.loss_type!r} is not defined for objective='decoupled', whose ratio r is only a part "
            f"of the policy ratio: set one of {', '.join(map(repr, CLIPPED_LOSS_TYPES))}."
        )
    if config.delta is not None:
        raise ValueError(
            f"delta={config.delta!r} would cap r, not the policy ratio: leave it out and set behavior_weight_cap."
        )
    for name, value in (("proximal_method", "reuse"), ("fresh_proximal", "policy")):
        if getattr(config, name) == value and steps > 1:
            raise ValueError(
                f"{name}={value!r} with {steps} optimizer steps a generation batch would move the trust region "
                f"along with the policy: set num_iterations=1 and steps_per_generation <= "
                "gradient_accumulation_steps, or choose another value."
            )


def _check_rival(config: "A3POConfig") -> None:
    if config.loss_type not in RIVAL_LOSS_TYPES:
        raise ValueError(
            f"loss_type={config.loss_type!r} brings a ratio or weight of its own, which objective="
            f"{config.objective!r} replaces: set one of {', '.join(map(repr, RIVAL_LOSS_TYPES))}."
        )
    if config.importance_sampling_level != "token":
        raise ValueError(
            f"importance_sampling_level={config.importance_sampling_level!r} with objective={config.objective!r} "
            "cannot hold, because its weights are those of single tokens: set 'token'."
        )
    if config.delta is not None:
        raise ValueError(
            f"delta={config.delta!r} would cap r, which is not the policy ratio of objective={config.objective!r}: "
            "leave it out and set the bound of the objective."
        )
    if config.objective != "masked_is":
        return
    if config.proximal_method not in ("reuse", "recompute"):
        raise ValueError(
            f"objective='masked_is' weighs the policy at take against the behavior policy, which proximal_method="
            f"{config.proximal_method!r} is not: set 'reuse' (one optimizer step a batch) or 'recompute'."
        )
    if config.proximal_method == "reuse" and config.optimizer_steps_per_generation > 1:
        raise ValueError(
            f"proximal_method='reuse' with {config.optimizer_steps_per_generation} optimizer steps a generation "
            "batch would move the trust region along with the policy: set 'recompute', or num_iterations=1 and "
            "steps_per_generation <= gradient_accumulation_steps."
        )


def _check_balanced(config: "A3POConfig") -> None:
    """ASymPO and SPO rest on the sum of a group's advantages being zero: refuse what changes it unseen."""
    needs = {
        "loss_type": ("grpo", "the mean over each completion, then over completions"),
        "importance_sampling_level": ("token", "no ratio at all"),
        "scale_rewards": ("none", "advantages that are only centred"),
        "multi_objective_aggregation": ("sum_then_normalize", "advantages centred within their group"),
        "mask_truncated_completions": (False, "every completion of a group"),
        "top_entropy_quantile": (1.0, "every token of a completion"),
        "off_policy_mask_threshold": (None, "every completion of a group"),
        "delta": (None, "no ratio at all"),
    }
    for name, (needed, why) in needs.items():
        value = getattr(config, name)
        if value != needed:
            raise ValueError(
                f"objective={config.objective!r} needs {why}, which {name}={value!r} breaks: set {name}={needed!r}."
            )
