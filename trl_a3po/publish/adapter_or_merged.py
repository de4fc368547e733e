"""What an engine is sent of the policy: all of it as it is, or with its adapter folded in.

Guarantees: what the engine is built from (`sent_spec`) is what an update then consists of (`sent_parts`).
"""

import logging
from collections.abc import Callable

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trl_a3po.config import A3POConfig
from trl_a3po.engines.vllm.adapter_support import adapter_obstacle
from trl_a3po.protocol.weights import PolicySpec
from trl_a3po.publish.collect import policy_parts, policy_spec
from trl_a3po.publish.merged import merged_parts, merged_spec
from trl_a3po.publish.update_parts import Part

logger = logging.getLogger(__name__)


def sent_spec(args: A3POConfig, model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> PolicySpec:
    """What an engine that runs in `dtype` is built from.

    Raises:
        ValueError: the model, or its adapter, cannot be rebuilt in an engine.
    """
    return (merged_spec if sent_merged(args, model) else policy_spec)(model, dtype)


def sent_parts(
    args: A3POConfig, model: PreTrainedModel | PeftModel
) -> Callable[[PreTrainedModel | PeftModel], dict[str, Part]]:
    """Module -> what an update of it consists of."""
    return merged_parts if sent_merged(args, model) else policy_parts


def sent_merged(args: A3POConfig, model: PreTrainedModel | PeftModel) -> bool:
    """Whether the engine is sent the model with its adapter folded in: as set, or because vLLM cannot serve it."""
    if not isinstance(model, PeftModel) or args.lora_sync == "merged":
        return isinstance(model, PeftModel)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    obstacle = adapter_obstacle(model.active_peft_config, trained) if args.engine == "vllm" else None
    if obstacle is not None:
        logger.warning("The adapter is published merged into its weights (lora_sync='merged'), because %s.", obstacle)
    return obstacle is not None
