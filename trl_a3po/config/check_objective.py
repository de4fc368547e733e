"""What an objective can be combined with: the settings that its record restricts, the trust region, the KL term.

Guarantees: with settings that pass, the anchor and the weight that the objective gives to TRL's loss make TRL's loss
the objective's own.
"""

from dataclasses import fields
from typing import TYPE_CHECKING

from trl_a3po.objectives.table import OBJECTIVES, SETTINGS_OF, ObjectiveSettings

if TYPE_CHECKING:
    from trl_a3po.config.a3po_config import A3POConfig


def check_objective(config: "A3POConfig") -> None:
    """Raise `ValueError` for settings with which the loss would not be the objective's."""
    _check_needs(config)
    _check_unused(config)
    _check_one_step(config)
    _check_kl(config)
    _check_comparison(config)


def _check_needs(config: "A3POConfig") -> None:
    for need in config.objective_record.needs:
        value = getattr(config, need.setting)
        if value not in need.values:
            raise ValueError(
                f"objective={config.objective!r} needs {need.why}, which {need.setting}={value!r} breaks: set "
                f"{need.setting}={' or '.join(map(repr, need.values))}."
            )


def _check_unused(config: "A3POConfig") -> None:
    """A setting of another objective would be ignored."""
    for setting in fields(ObjectiveSettings):
        value = getattr(config, setting.name)
        if value != setting.default and setting.name not in SETTINGS_OF[config.objective]:
            users = [name for name, settings in SETTINGS_OF.items() if setting.name in settings]
            raise ValueError(
                f"{setting.name}={value!r} is not used by objective={config.objective!r}: leave it out, or set "
                f"objective={' or '.join(map(repr, users))}."
            )


def _check_one_step(config: "A3POConfig") -> None:
    """An anchor on the current policy is a trust region only at the first optimizer step of a batch."""
    steps = config.optimizer_steps_per_generation
    for name, value in (("proximal_method", "reuse"), ("fresh_proximal", "policy")):
        if steps > 1 and getattr(config, name) == value:
            raise ValueError(
                f"{name}={value!r} with {steps} optimizer steps per generation batch would move the trust region "
                "along with the policy: set num_iterations=1 and steps_per_generation <= "
                f"gradient_accumulation_steps, or choose another {name}."
            )


def _check_kl(config: "A3POConfig") -> None:
    """TRL corrects the KL term by the ratio to the anchor, which must then be the behavior policy."""
    if config.beta == 0 or not config.use_bias_correction_kl:
        return
    if not config.objective_record.ratio_is_behavior_ratio(config, config.staleness_bound):
        raise ValueError(
            f"use_bias_correction_kl=True with objective={config.objective!r}, proximal_method="
            f"{config.proximal_method!r} and tokens up to {config.staleness_bound} steps stale multiplies the KL term "
            "by a ratio that is not taken from the behavior policy: set use_bias_correction_kl=False, or "
            f"objective={_objectives_with_behavior_ratio()} with max_staleness=1 or proximal_method='behavior'."
        )


def _objectives_with_behavior_ratio() -> str:
    """The objectives whose ratio can be the ratio to the behavior policy."""
    settings = ObjectiveSettings(proximal_method="behavior")
    able = [name for name, objective in OBJECTIVES.items() if objective.ratio_is_behavior_ratio(settings, 0)]
    return " or ".join(map(repr, able))


def _check_comparison(config: "A3POConfig") -> None:
    if not config.compare_proximal_every:
        return
    if config.proximal_method != "loglinear":
        raise ValueError(
            f"compare_proximal_every={config.compare_proximal_every} compares the log-linear anchor, which "
            f"proximal_method={config.proximal_method!r} does not use: set compare_proximal_every=0, or "
            "proximal_method='loglinear'."
        )
    if config.schedule == "periodic":
        raise ValueError(
            f"compare_proximal_every={config.compare_proximal_every} has nothing to compare with "
            "schedule='periodic', where no token is stale: set compare_proximal_every=0."
        )
