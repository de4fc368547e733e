"""Checks of the policy and of the launch: the engine can hold the policy and sample from it, and training can gather
it.

Guarantees: nothing is changed; the cost is two forwards of a few tokens.
"""

from typing import Any

import torch
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trl_a3po.config import A3POConfig
from trl_a3po.engines.transformers.architecture import check_architecture
from trl_a3po.engines.transformers.sampling import check_sampling
from trl_a3po.engines.vllm.servers.completions import logprobs_modes
from trl_a3po.models.eval_mode import eval_mode
from trl_a3po.models.fsdp_groups import is_gathered_uncalled
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.publish.adapter_or_merged import check_published
from trl_a3po.publish.quantised import is_quantised


def check_policy(args: A3POConfig, model: PreTrainedModel | PeftModel, sampling: SamplingSettings) -> None:
    """Raise `ValueError` for a policy that the engine cannot hold, or cannot sample from with these settings."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"No parameter of the model requires a gradient, so there is nothing to train: {_remedy(model)}."
        )
    if any(map(is_quantised, model.parameters())):
        _check_quantised(args)
    check_published(args, model)
    config = model.config.get_text_config()
    check_sampling(sampling, config.vocab_size)
    if args.engine == "vllm" and args.vllm_server_urls:
        logprobs_modes(sampling)
    if args.engine == "transformers":
        check_architecture(model, deterministic=args.deterministic)
    context, longest = getattr(config, "max_position_embeddings", None), args.engine_max_prompt_tokens
    if context is not None and longest is not None and longest + args.max_completion_length > context:
        raise ValueError(
            f"max_completion_length={args.max_completion_length} with prompts of up to {longest} tokens does not fit "
            f"into the model's context of {context} tokens: lower max_completion_length or engine_max_prompt_tokens."
        )
    _check_left_padding(model, config)


def check_sharding(fsdp_plugin: Any | None) -> None:
    """Raise `ValueError` for a launch that spreads the weights in a way that publishing cannot gather.

    Args:
        fsdp_plugin: accelerate's; `None` for a launch without FSDP.
    """
    if fsdp_plugin is None:
        return
    if fsdp_plugin.fsdp_version != 2:
        raise ValueError(
            f"The run was launched with fsdp_version={fsdp_plugin.fsdp_version}, which flattens the weights, so that "
            "they cannot be published to an engine: set fsdp_version: 2 (recipes/accelerate_configs/fsdp2.yaml), or "
            "launch it with DDP or DeepSpeed ZeRO."
        )
    if fsdp_plugin.activation_checkpointing:
        raise ValueError(
            "The run was launched with fsdp_activation_checkpointing: true, which wraps the layers whose weights are "
            "published: set it to false, and gradient_checkpointing=True, which recomputes activations as well."
        )


def check_shards(args: A3POConfig, is_fsdp_enabled: bool, model: PreTrainedModel | PeftModel) -> None:
    """Raise `ValueError` for weights that FSDP2 would not shard, or that were sharded before training does it."""
    if is_fsdp_enabled and args.torch_compile:
        raise ValueError(
            "torch_compile=True cannot hold under FSDP2, whose shards of a compiled model cannot be published: set "
            "torch_compile=False, or launch it with DDP."
        )
    if is_fsdp_enabled and any(map(is_quantised, model.parameters())):
        raise ValueError(
            "The model is quantised, but FSDP2 does not shard quantised weights: launch it with DDP or ZeRO-2, or "
            "load the model in bfloat16."
        )
    sharded = next((name for name, weight in model.named_parameters() if isinstance(weight, DTensor)), None)
    if sharded is not None and not (is_fsdp_enabled and isinstance(model, FSDPModule)):
        raise ValueError(
            f"The model was loaded in parts ({sharded!r} is a DTensor), which publishing does not gather: load it "
            "without a distributed_config, and launch it with FSDP2 (recipes/accelerate_configs/fsdp2.yaml)."
        )


def check_head(model: PreTrainedModel | PeftModel) -> None:
    """Raise `ValueError` for a model whose trained output layer FSDP2 has sharded in a group of its own. TRL's forward
    uses the weight of this layer without calling it, so FSDP2 does not gather it, and TRL gathers it with a backward
    that drops the other processes' part."""
    if not isinstance(model, FSDPModule):
        return
    head = model.get_output_embeddings()
    if head is not None and not is_gathered_uncalled(model, head):
        raise ValueError(
            "The output layer is trained, and FSDP2 shards it in a group of its own, so that its gradient would not "
            "be averaged over the processes: set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, and leave out "
            "fsdp_transformer_layer_cls_to_wrap, which may name the class of this layer; or launch it with DDP or "
            "DeepSpeed ZeRO."
        )


def check_evaluated(is_fsdp_enabled: bool, model: torch.nn.Module) -> None:
    """Raise `ValueError` for an evaluation before training under FSDP2: accelerate shards a model and its optimizer
    together."""
    if is_fsdp_enabled and not isinstance(model, FSDPModule):
        raise ValueError(
            "evaluate() was called before train(), but FSDP2 shards the model when training begins: set "
            "eval_on_start=True, or evaluate after train()."
        )


def check_parallelism(tensor: int, context: int, sequence: int) -> None:
    """Raise `ValueError` for a policy that is split over processes: its layers, or the sequences that it reads."""
    for kind, size in (("tensor", tensor), ("context", context), ("sequence", sequence)):
        if size > 1:
            raise ValueError(
                f"The policy is split by {kind} parallelism of size {size}, whose parts cannot be published to an "
                "engine or trained with these losses yet: launch it with DDP, DeepSpeed ZeRO or FSDP2 "
                "(recipes/accelerate_configs), and load the model without a tp_plan."
            )


def check_trained_before(trained_before: bool, is_deepspeed_enabled: bool) -> None:
    """Raise `ValueError` for a second `train()` under DeepSpeed: accelerate discards its engine after the first."""
    if trained_before and is_deepspeed_enabled:
        raise ValueError(
            "train() was called a second time under DeepSpeed, whose engine exists only during the first: create a "
            "new A3POTrainer, and resume with resume_from_checkpoint."
        )


def _check_quantised(args: A3POConfig) -> None:
    if args.vllm_server_urls:
        raise ValueError(
            f"vllm_server_urls={args.vllm_server_urls!r} with a quantised model: these servers hold other weights "
            "than those that the trainer computes with. Leave vllm_server_urls out, so that the trainer runs "
            "vLLM with the dequantised weights; or load the model in bfloat16."
        )
    if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        raise ValueError(
            "The model is quantised, but DeepSpeed ZeRO-3 does not partition quantised weights: use ZeRO-2, or load "
            "the model in bfloat16."
        )


@torch.no_grad()
def _check_left_padding(model: PreTrainedModel | PeftModel, config: Any) -> None:
    """TRL trains on prompts that are padded on the left and lets the model compute positions, while an engine samples
    without padding. With learned positions the two give unrelated log-probs, and no error."""
    if any("rope" in name or "rotary" in name for name in config.to_dict()):
        return
    ids = torch.arange(4, device=model.device)[None] % config.vocab_size
    padded = torch.cat([torch.zeros_like(ids), ids], dim=1)
    mask = torch.cat([torch.zeros_like(ids), torch.ones_like(ids)], dim=1)
    with eval_mode(model):
        plain = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1].float().log_softmax(-1)
        shifted = model(input_ids=padded, attention_mask=mask).logits[:, -1].float().log_softmax(-1)
    gap = (plain - shifted).abs().max().item()
    if gap > (1e-3 if model.dtype == torch.float32 else 0.1):
        raise ValueError(
            f"The log-probs of a {config.model_type!r} model change by up to {gap:.2g} when a prompt is padded on the "
            "left. TRL's training forward pads prompts so, but the engine does not: use a model whose positions are "
            "rotary or follow the attention mask."
        )


def _remedy(model: PreTrainedModel | PeftModel) -> str:
    if isinstance(model, PeftModel):
        return "load the adapter with PeftModel.from_pretrained(..., is_trainable=True)"
    return "call model.requires_grad_(True), or leave those layers trainable that are to be trained"
