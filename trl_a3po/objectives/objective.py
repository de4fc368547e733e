"""`Objective`: everything the rest of the library knows about an objective, in one record.

Guarantees: the trainer, the configuration's checks, the plan and the documentation read an objective from its record
and have no branch for any objective.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from trl_a3po.objectives.stats import Tally

AnchorFunction = Callable[..., tuple[torch.Tensor, torch.Tensor, Tally]]


@dataclass(frozen=True)
class Need:
    """A setting whose other values an objective cannot be trained with.

    Args:
        setting: a field of `A3POConfig`.
        values: the values that the objective can be trained with; the error message advises the first one.
        why: what the objective needs the setting for, in words that follow "the objective needs".
    """

    setting: str
    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Objective:
    """An objective as the trainer, the checks, the plan and the documentation use it.

    Args:
        name: the value of `A3POConfig.objective`.
        summary: what the objective is, in a few words.
        formula: what is minimised for a token, as Markdown.
        paper: the source, as Markdown.
        anchor: `(policy_logps, behavior_logps, staleness, advantages, mask, **options) -> (anchor_logps, weight,
            stats)`, all tensors `(B, T)` but the advantages, `(B,)` or, if the objective allows it, `(B, T)`; anchor
            and weight are detached.
        arguments: field of `A3POConfig` -> the option of `anchor` that takes its value.
        plan: settings -> the words of the plan.
        needs: the settings that the objective restricts.
        has_proximal_policy: whether the objective clips a ratio to a proximal policy. `anchor` then also takes
            `recomputed_logps`, `epsilon_low` and `epsilon_high`.
        ratio_is_behavior_ratio: `(settings, staleness_bound) -> bool`: whether the ratio to the anchor is the ratio
            to the behavior policy for every token at most `staleness_bound` steps stale.
    """

    name: str
    summary: str
    formula: str
    paper: str
    anchor: AnchorFunction
    arguments: Mapping[str, str]
    plan: Callable[[Any], str]
    needs: tuple[Need, ...] = field(default=())
    has_proximal_policy: bool = False
    ratio_is_behavior_ratio: Callable[[Any, int], bool] = lambda settings, staleness_bound: False

    def anchor_and_weight(
        self,
        settings: Any,
        policy_logps: torch.Tensor,
        behavior_logps: torch.Tensor,
        staleness: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        *,
        recomputed_logps: torch.Tensor | None,
        epsilon_low: float,
        epsilon_high: float,
    ) -> tuple[torch.Tensor, torch.Tensor, Tally]:
        """`(anchor_logps, weight, stats)` of one micro-batch: anchor and weight are `(B, T)` and detached.

        Args:
            settings: an object with the fields that `arguments` names, as `A3POConfig` is.
            policy_logps, behavior_logps, staleness, mask: `(B, T)`.
            advantages: `(B,)` or, if the objective allows it, `(B, T)`.
            recomputed_logps: `(B, T)`, from a forward pass with the weights at the take, or `None`.
            epsilon_low, epsilon_high: the clip band of the ratio to the proximal policy.
        """
        options = {option: getattr(settings, name) for name, option in self.arguments.items()}
        if self.has_proximal_policy:
            options |= {
                "recomputed_logps": recomputed_logps,
                "epsilon_low": epsilon_low,
                "epsilon_high": epsilon_high,
            }
        return self.anchor(policy_logps, behavior_logps, staleness, advantages, mask, **options)

    def allows(self, setting: str, value: Any) -> bool:
        """Whether the objective can be trained with this value of a setting."""
        return all(value in need.values for need in self.needs if need.setting == setting)


@dataclass
class SettingsOfObjective:
    """Base of the dataclass whose fields are the settings of one objective."""

    _record: ClassVar[Objective]
