"""Finds what makes the training forward random.

The engine samples without dropout, so that the log-probs it records are those of the policy. What is random in the
training forward then becomes part of the importance ratio, at every staleness.
"""

import logging
from collections import Counter
from typing import Any

from torch import nn

from trl_a3po.config import A3POConfig

logger = logging.getLogger(__name__)

# Settings of a model's configuration that its layers apply without a module of their own.
_OF_CONFIG = ("attention_dropout", "attention_probs_dropout_prob", "layerdrop", "router_jitter_noise")


def warn_of_noise(args: A3POConfig, model: nn.Module) -> None:
    """Log a warning with each source of noise in the training forward of `model`, and its size."""
    found = noise(args, model)
    if found:
        logger.warning(
            "The training forward is random (%s), but the engine samples without noise. The difference enters every "
            "importance ratio: max_staleness=0 does not train exactly as GRPO does, and where the noise is large, "
            "tokens are clipped. Watch a3po/rho/min, a3po/rho/max and a3po/ess, or set %s.",
            ", ".join(source for source, _ in found),
            " and ".join(dict.fromkeys(remedy for _, remedy in found)),
        )


def noise(args: A3POConfig, model: nn.Module) -> list[tuple[str, str]]:
    """The sources of noise in the training forward of `model`, each with the setting that turns it off."""
    config: dict[str, Any] = model.config.get_text_config().to_dict()  # type: ignore[operator, union-attr]  # a Tensor or Module
    layers: Counter[tuple[float, bool]] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            layers[module.p, "lora_dropout" in name] += 1
    found = []
    for (p, is_adapter), number in sorted(layers.items()):
        what, remedy = ("lora_dropout", "lora_dropout=0") if is_adapter else ("dropout", "disable_dropout=True")
        found.append((f"{what}={p:g} in {number} {'layers' if number > 1 else 'layer'}", remedy))
    for name in _OF_CONFIG:
        if config.get(name):
            found.append((f"{name}={config[name]:g}", f"{name}=0 in the model's configuration"))
    if args.neftune_noise_alpha:
        found.append((f"neftune_noise_alpha={args.neftune_noise_alpha:g}", "neftune_noise_alpha=None"))
    return found
