"""The trainer's policy as the run publishes it: whole or as an adapter, in this process or spread over several.

Guarantees: what the engine is built for (`sent_spec`) is what it is then sent (`trained_policy`).
"""

import logging

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trl_a3po.config import A3POConfig
from trl_a3po.engines.vllm.adapters import adapter_obstacle
from trl_a3po.publish.collect import policy_parts, policy_spec
from trl_a3po.publish.merged import merged_parts, merged_spec
from trl_a3po.publish.partitioned import PartitionedPolicy
from trl_a3po.publish.perturb import WholePolicy
from trl_a3po.publish.policy import PolicySpec

logger = logging.getLogger(__name__)


def trained_policy(trainer) -> WholePolicy | PartitionedPolicy:
    """The trainer's policy as a session publishes and checks it. Made by every process, at the same place."""
    model, accelerator = trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator
    parts = merged_parts if sent_merged(trainer.args, model) else policy_parts
    if zero_stage(trainer) == 3:

        def forward(input_ids: torch.Tensor, length: int) -> torch.Tensor:
            ids = input_ids.to(accelerator.device)
            return trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), length)[0]

        return PartitionedPolicy(trainer._team, model, parts(model), forward)
    return WholePolicy(model, parts)


def sent_spec(args: A3POConfig, model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> PolicySpec:
    """What an engine that runs in `dtype` is built from.

    Raises:
        ValueError: the model, or its adapter, cannot be rebuilt in an engine.
    """
    return (merged_spec if sent_merged(args, model) else policy_spec)(model, dtype)


def sent_merged(args: A3POConfig, model: PreTrainedModel | PeftModel) -> bool:
    """Whether the engine is sent the model with its adapter folded in: as set, or because vLLM cannot serve it."""
    if not isinstance(model, PeftModel) or args.lora_sync == "merged":
        return isinstance(model, PeftModel)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    obstacle = adapter_obstacle(model.active_peft_config, trained) if args.engine == "vllm" else None
    if obstacle is not None:
        logger.warning("The adapter is published merged into its weights (lora_sync='merged'), because %s.", obstacle)
    return obstacle is not None


def zero_stage(trainer) -> int:
    """DeepSpeed's ZeRO stage, 0 without DeepSpeed."""
    return trainer.accelerator.state.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else 0
