"""How a policy with an adapter is published: base model and adapter, or the adapter merged into the base model.

Guarantees: the model that an engine is built from (`published_spec`) has the weights that its updates hold
(`published_sources`).
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trl_a3po.config import A3POConfig
from trl_a3po.engines.vllm.adapter_support import adapter_obstacle
from trl_a3po.models.replica import check_replica
from trl_a3po.models.unwrap import active_adapter
from trl_a3po.protocol.weights import PolicySpec
from trl_a3po.publish.collect import check_adapts_weights, policy_sources, policy_spec
from trl_a3po.publish.merged import CannotMerge, merged_sources, merged_spec
from trl_a3po.publish.weight_sources import WeightSource

logger = logging.getLogger(__name__)


def published_spec(args: A3POConfig, model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> PolicySpec:
    """What an engine that runs in `dtype` is built from.

    Raises:
        ValueError: the model, or its adapter, cannot be rebuilt in an engine.
    """
    if not isinstance(model, PeftModel):
        return policy_spec(model, dtype)
    check_adapts_weights(model)
    if not publishes_merged(args, model):
        return policy_spec(model, dtype)
    try:
        return merged_spec(model, dtype)
    except CannotMerge as error:
        if args.lora_sync == "merged":
            raise ValueError(f"lora_sync='merged' {error}. {_instead_of_merging(args)}") from None
        raise ValueError(
            f"engine='vllm' cannot serve the adapter, because {_obstacle(args, model)}, and lora_sync='merged' "
            f"{error}. Set engine='transformers', or use LoraConfig on linear layers."
        ) from None


def check_published(args: A3POConfig, model: PreTrainedModel | PeftModel) -> None:
    """Raise `ValueError` for a policy that an engine cannot rebuild with the weights that its updates hold."""
    spec = published_spec(args, model, model.dtype)
    sources = published_sources(args, model)(model)
    check_replica(spec, {name: source.shape for name, source in sources.items()})


def published_sources(
    args: A3POConfig, model: PreTrainedModel | PeftModel
) -> Callable[[Any], dict[str, WeightSource]]:
    """A function that takes the module and returns the sources of the weights of its updates, by name. The names are
    those of the adapter that is active now, also if another one is active later."""
    if publishes_merged(args, model):
        return merged_sources
    if not isinstance(model, PeftModel):
        return policy_sources
    return partial(policy_sources, adapter=active_adapter(model))


def check_frozen(args: A3POConfig, model: PreTrainedModel | PeftModel, changed: set[str]) -> None:
    """Raise `ValueError` for frozen weights that have changed, where the engine is sent the adapter alone."""
    if args.engine == "vllm" and isinstance(model, PeftModel) and not publishes_merged(args, model):
        raise ValueError(
            f"Frozen weights of the model have changed during training ({min(changed)!r}, {len(changed)} in all), but "
            "engine='vllm' is sent the adapter alone: set lora_sync='merged', or leave these weights as they are."
        )


def publishes_merged(args: A3POConfig, model: PreTrainedModel | PeftModel) -> bool:
    """Whether the adapter is published merged into the base model: because it is set, or because vLLM cannot serve
    it."""
    if not isinstance(model, PeftModel):
        return False
    if args.lora_sync == "merged":
        return True
    obstacle = _obstacle(args, model)
    if obstacle is not None:
        logger.warning("The adapter is published merged into its weights (lora_sync='merged'), because %s.", obstacle)
    return obstacle is not None


def _obstacle(args: A3POConfig, model: PeftModel) -> str | None:
    """Why the engine cannot serve the adapter itself; `None` if it can."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return adapter_obstacle(model.active_peft_config, trained) if args.engine == "vllm" else None


def _instead_of_merging(args: A3POConfig) -> str:
    if args.engine == "vllm":
        return "Set engine='transformers' and lora_sync='adapter', or use LoraConfig on linear layers."
    return "Set lora_sync='adapter'."
