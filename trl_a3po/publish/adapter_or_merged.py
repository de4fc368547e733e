"""How a policy with an adapter is published: base model and adapter, or the adapter merged into the base model.

Guarantees: the model that an engine is built from (`published_spec`) has the weights that its updates hold
(`published_sources`).
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trl_a3po.config import A3POConfig
from trl_a3po.engines.vllm.adapter_support import adapter_obstacle
from trl_a3po.protocol.weights import PolicySpec
from trl_a3po.publish.collect import policy_sources, policy_spec
from trl_a3po.publish.merged import merged_sources, merged_spec
from trl_a3po.publish.weight_sources import WeightSource

logger = logging.getLogger(__name__)


def published_spec(args: A3POConfig, model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> PolicySpec:
    """What an engine that runs in `dtype` is built from.

    Raises:
        ValueError: the model, or its adapter, cannot be rebuilt in an engine.
    """
    if isinstance(model, PeftModel) and publishes_merged(args, model):
        return merged_spec(model, dtype)
    return policy_spec(model, dtype)


def published_sources(
    args: A3POConfig, model: PreTrainedModel | PeftModel
) -> Callable[[Any], dict[str, WeightSource]]:
    """A function that takes the module and returns the sources of the weights of its updates, by name."""
    return merged_sources if publishes_merged(args, model) else policy_sources


def publishes_merged(args: A3POConfig, model: PreTrainedModel | PeftModel) -> bool:
    """Whether the adapter is published merged into the base model: because it is set, or because vLLM cannot serve
    it."""
    if not isinstance(model, PeftModel):
        return False
    if args.lora_sync == "merged":
        return True
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    obstacle = adapter_obstacle(model.active_peft_config, trained) if args.engine == "vllm" else None
    if obstacle is not None:
        logger.warning("The adapter is published merged into its weights (lora_sync='merged'), because %s.", obstacle)
    return obstacle is not None
