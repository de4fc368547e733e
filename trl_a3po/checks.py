"""What a run needs of its arguments, model, data and engine, checked before it costs anything.

Guarantees: what can be known when the trainer is built is refused there; the rest where it is first seen, with the row
or the completion it concerns. Nothing is changed.
"""

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import is_compiled_module
from datasets import Dataset, IterableDataset
from peft import PeftModel
from transformers import PreTrainedModel, ProcessorMixin
from trl.data_utils import is_conversational

from trl_a3po.config import STEP_NORMALIZED_LOSS_TYPES, A3POConfig
from trl_a3po.engines.embedded.forward import check_architecture
from trl_a3po.engines.embedded.sampling import check_sampling
from trl_a3po.engines.protocol import SamplingSettings
from trl_a3po.engines.vllm.adapters import adapter_obstacle
from trl_a3po.engines.vllm.completions import logprobs_modes
from trl_a3po.errors import EngineError, RewardError
from trl_a3po.publish.collect import policy_spec
from trl_a3po.publish.merged import merged_spec
from trl_a3po.rollout.records import Group
from trl_a3po.rollout.reward_workers import pickled

logger = logging.getLogger(__name__)

# --- before the trainer is built ------------------------------------------------------------------------------------


def check_arguments(model: Any, reward_funcs: Any, args: A3POConfig, others: dict[str, Any]) -> None:
    """Raise `TypeError` or `ValueError` for arguments of `A3POTrainer` that cannot be trained with; `others` are those
    that were given beside the first three, by name."""
    if not isinstance(args, A3POConfig):
        raise TypeError(f"args is a {type(args).__name__}: pass an A3POConfig, which takes every field of GRPOConfig.")
    for name, instead in (
        ("tools", "train without tools"),
        ("rollout_func", "pass an `engine` object in A3POConfig"),
        ("environment_factory", "put the prompts into `train_dataset` and the score into `reward_funcs`"),
    ):
        if others.get(name):
            raise ValueError(f"{name} is not supported in asynchronous generation yet: {instead}, or use GRPOTrainer.")
    check_processing_class(others.get("processing_class"))
    if others.get("quantization_config") is not None or "quantization_config" in (args.model_init_kwargs or {}):
        raise ValueError(
            "quantization_config is set, but a quantised policy cannot be rebuilt in the engine yet: leave it out and "
            "load the model in bfloat16, with a LoRA peft_config to save memory."
        )
    if not isinstance(model, str):
        _check_model_object(model)
    for func in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if func is not None and not isinstance(func, str) and not callable(func):
            raise TypeError(
                f"reward_funcs holds {func!r}, which cannot be called: pass functions, reward models or their names."
            )


def check_processing_class(processing_class: Any) -> None:
    """Raise `ValueError` for a processor of images, sound or video."""
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"processing_class is a {type(processing_class).__name__}: multimodal models are not supported yet. Pass "
            "a text model and its tokenizer."
        )


def _check_model_object(model: Any) -> None:
    if is_compiled_module(model):
        raise ValueError(
            "model was compiled by torch.compile: pass the model itself and set torch_compile=True, which compiles "
            "only what is trained."
        )
    if not isinstance(model, (PreTrainedModel, PeftModel)):
        raise TypeError(
            f"model is a {type(model).__name__}: pass the name or folder of a model, a PreTrainedModel or a PeftModel."
        )
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not base.can_generate():
        raise ValueError(
            f"model is a {type(base).__name__}, which has no head to generate text with: pass a causal language "
            "model, as AutoModelForCausalLM loads it."
        )


# --- when it is built -----------------------------------------------------------------------------------------------


def check_policy(args: A3POConfig, model: PreTrainedModel | PeftModel, sampling: SamplingSettings) -> None:
    """Raise `ValueError` for a policy that the engine cannot be given, or cannot sample from with these settings."""
    (merged_spec if sent_merged(args, model) else policy_spec)(model, model.dtype)
    config = model.config.get_text_config()
    check_sampling(sampling, config.vocab_size)
    if args.engine == "vllm":
        logprobs_modes(sampling)
    if args.engine == "transformers":
        check_architecture(model, deterministic=args.deterministic)
    context, longest = getattr(config, "max_position_embeddings", None), args.engine_max_prompt_tokens
    if context is not None and longest is None and args.max_completion_length >= context:
        raise ValueError(
            f"max_completion_length={args.max_completion_length} leaves no room for a prompt in the model's context "
            f"of {context} tokens: set it to {context} less the length of your longest prompt."
        )
    if context is not None and longest is not None and longest + args.max_completion_length > context:
        raise ValueError(
            f"max_completion_length={args.max_completion_length} with prompts of up to {longest} tokens does not fit "
            f"into the model's context of {context} tokens: lower max_completion_length or engine_max_prompt_tokens."
        )
    _check_left_padding(model, config)


def sent_merged(args: A3POConfig, model: PreTrainedModel | PeftModel) -> bool:
    """Whether the engine is sent the model with its adapter folded in: as set, or because vLLM cannot serve it."""
    if not isinstance(model, PeftModel) or args.lora_sync == "merged":
        return isinstance(model, PeftModel)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    obstacle = adapter_obstacle(model.active_peft_config, trained) if args.engine == "vllm" else None
    if obstacle is not None:
        logger.warning("The adapter is published merged into its weights (lora_sync='merged'), because %s.", obstacle)
    return obstacle is not None


@torch.no_grad()
def _check_left_padding(model: PreTrainedModel | PeftModel, config: Any) -> None:
    """TRL trains on prompts padded on the left and leaves positions to the model, while an engine samples without
    padding: with learned positions their log-probs have nothing in common, without an error anywhere."""
    if any("rope" in name or "rotary" in name for name in config.to_dict()):
        return
    ids = torch.arange(4, device=model.device)[None] % config.vocab_size
    padded = torch.cat([torch.zeros_like(ids), ids], dim=1)
    mask = torch.cat([torch.zeros_like(ids), torch.ones_like(ids)], dim=1)
    was_training = model.training
    model.eval()
    plain = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1].float().log_softmax(-1)
    shifted = model(input_ids=padded, attention_mask=mask).logits[:, -1].float().log_softmax(-1)
    model.train(was_training)
    gap = (plain - shifted).abs().max().item()
    if gap > (1e-3 if model.dtype == torch.float32 else 0.1):
        raise ValueError(
            f"A {config.model_type!r} model gives other log-probs when a prompt is padded on the left (by up to "
            f"{gap:.2g}), as TRL's training forward pads it and the engine does not: use a model whose positions are "
            "rotary or follow the attention mask."
        )


def check_sharding(is_fsdp_enabled: bool) -> None:
    """Raise `ValueError` for a way to spread the weights that nothing here can gather."""
    if is_fsdp_enabled:
        raise ValueError(
            "The run was launched with FSDP, whose shards cannot be published to an engine yet: launch it with DDP or "
            "DeepSpeed ZeRO (recipes/accelerate_configs)."
        )


def check_trained_before(trained_before: bool, is_deepspeed_enabled: bool) -> None:
    """Raise `ValueError` for a second `train()` on an engine of DeepSpeed's that accelerate has let go of."""
    if trained_before and is_deepspeed_enabled:
        raise ValueError(
            "train() was called a second time under DeepSpeed, whose engine does not outlive the first: make a new "
            "A3POTrainer, with resume_from_checkpoint to go on."
        )


def groups_per_batch(args: A3POConfig) -> int:
    """The prompts of one generation batch."""
    return args.generation_batch_size // args.num_generations


def groups_per_take(args: A3POConfig) -> int:
    """B: the groups that one take hands out, all of the generation batch or, with `schedule="periodic"`, those of one
    micro-step."""
    return groups_per_batch(args) // args.takes_per_generation


def check_periodic(args: A3POConfig, *, deepspeed: bool, aux_loss: float) -> None:
    """Raise `ValueError` for what would make `schedule="periodic"` train something else than `schedule="sync"`: a
    backward that steps the optimizer before the gradients are scaled, and a loss of the micro-batch as a whole, whose
    coefficient is `aux_loss`."""
    if args.schedule != "periodic" or args.gradient_accumulation_steps == 1:
        return
    if deepspeed and args.loss_type in STEP_NORMALIZED_LOSS_TYPES:
        raise ValueError(
            f"schedule='periodic' with loss_type={args.loss_type!r} scales the gradients once the period's tokens are "
            "known, which DeepSpeed's backward leaves no room for: set loss_type='dr_grpo' or 'grpo', or launch "
            "without DeepSpeed."
        )
    if aux_loss:
        raise ValueError(
            f"schedule='periodic' with router_aux_loss_coef={aux_loss!r} would train a loss that "
            "depends on which groups meet in a micro-step: set router_aux_loss_coef=0.0, or schedule='sync'."
        )


def check_on_group(on_group: Any) -> None:
    if on_group is not None and not callable(on_group):
        raise TypeError(f"on_group is {on_group!r}: pass a function that is called with each finished group.")


def check_reward_functions(
    args: A3POConfig, functions: Sequence[Callable[..., Any] | None], names: Sequence[str]
) -> None:
    """Raise `RewardError` for a reward function that cannot reach a worker, and `ValueError` for reward models, whose
    rewards come too late for the filter; `None` stands for a reward model."""
    if args.reward_workers:
        pickled(functions, names)
    if args.drop_zero_variance_groups and None in functions:
        raise ValueError(
            f"drop_zero_variance_groups=True, but the reward model {names[functions.index(None)]!r} runs when a batch "
            "has been taken, when its groups cannot be replaced any more: set drop_zero_variance_groups=False."
        )


def check_dataset(args: A3POConfig, dataset: Dataset | IterableDataset, tokenizer: Any) -> None:
    """Raise `ValueError` for rows that cannot be prompts, and for fewer rows than one batch takes."""
    check_columns("train_dataset", dataset)
    groups = groups_per_batch(args)
    if isinstance(dataset, Dataset):
        if len(dataset) < groups:
            raise ValueError(
                f"train_dataset has {len(dataset)} rows, fewer than the {groups} prompts of one generation batch "
                f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}): use "
                "more rows or a smaller batch."
            )
        check_prompt(dataset[0], tokenizer)
    elif args.steps_per_generation * args.num_iterations % args.gradient_accumulation_steps:
        raise ValueError(
            f"train_dataset is a stream, and with steps_per_generation={args.steps_per_generation} and "
            f"num_iterations={args.num_iterations} it may end inside an optimizer step, which cannot be planned for: "
            "set steps_per_generation to a multiple of gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}."
        )


def check_columns(name: str, dataset: Any) -> None:
    """Raise `ValueError` for a dataset without prompts or with images; `name` is the trainer's argument."""
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_columns(f"{name}[{key!r}]", part)
        return
    columns = None if dataset is None else dataset.column_names
    if columns is not None and "prompt" not in columns:
        raise ValueError(
            f"{name} has the columns {', '.join(sorted(columns))}, but no 'prompt': rename the column that holds the "
            "prompt, as text or as a list of messages."
        )
    if columns is not None and {"image", "images"} & set(columns):
        raise ValueError(f"{name} has images, which are not supported yet: remove the column.")


# --- while it runs --------------------------------------------------------------------------------------------------


def check_prompt(row: dict[str, Any], tokenizer: Any) -> None:
    """Raise `ValueError` unless the row's `prompt` is text, or messages of text that the tokenizer has a template
    for."""
    if "prompt" not in row:
        raise ValueError(f"A row of train_dataset has the columns {', '.join(sorted(row))}, but no 'prompt'.")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not prompt or not is_conversational(row):
        raise ValueError(
            f"The prompt {_short(prompt)} is neither text nor a list of messages with 'role' and 'content': repair or "
            f"remove the row {_short(row)}."
        )
    if tokenizer.chat_template is None:
        raise ValueError(
            "The prompts are lists of messages, but the tokenizer has no chat_template to write them with: set "
            "processing_class.chat_template, or give the prompts as text."
        )
    parts = [part for message in prompt if isinstance(message["content"], list) for part in message["content"]]
    other = {part["type"] for part in parts if part["type"] != "text"}
    if other:
        raise ValueError(
            f"A message holds {', '.join(sorted(other))} beside text, which is not supported yet: remove the row "
            f"{_short(row)}."
        )


def check_prompt_ids(token_ids: Sequence[int], row: dict[str, Any], args: A3POConfig, config: Any) -> None:
    """Raise `ValueError` for a prompt without tokens, or one that does not fit the model's context or vocabulary."""
    if not token_ids:
        raise ValueError(
            "A prompt is empty after tokenisation, and nothing can be sampled from it: repair or remove the row "
            f"{_short(row)}."
        )
    context, limit = getattr(config, "max_position_embeddings", None), args.engine_max_prompt_tokens
    if context is not None and len(token_ids) + args.max_completion_length > context:
        raise ValueError(
            f"A prompt of {len(token_ids)} tokens and max_completion_length={args.max_completion_length} do not fit "
            f"into the model's context of {context} tokens: shorten or remove the row {_short(row)}, or lower "
            "max_completion_length."
        )
    if limit is not None and len(token_ids) > limit:
        raise ValueError(
            f"A prompt has {len(token_ids)} tokens, more than engine_max_prompt_tokens={limit}: raise it, or shorten "
            f"or remove the row {_short(row)}."
        )
    if not 0 <= min(token_ids) <= max(token_ids) < config.vocab_size:
        raise ValueError(
            f"The tokenizer gives token ids from {min(token_ids)} to {max(token_ids)}, but the model's vocabulary is "
            f"0 to {config.vocab_size - 1}: pass the model's own tokenizer as processing_class. The row: "
            f"{_short(row)}."
        )


def check_completions(groups: Sequence[Group], max_completion_length: int, vocab_size: int) -> None:
    """Raise `EngineError` for completions that no policy of this run can have sampled."""
    for group in groups:
        for rollout in group.rollouts:
            where = f"The engine returned a completion of prompt {group.prompt.index}"
            if not 0 <= min(rollout.token_ids) <= max(rollout.token_ids) < vocab_size:
                raise EngineError(
                    f"{where} with token ids from {min(rollout.token_ids)} to {max(rollout.token_ids)}, but the "
                    f"model's vocabulary is 0 to {vocab_size - 1}: it samples from another model."
                )
            if len(rollout.token_ids) > max_completion_length:
                raise EngineError(
                    f"{where} of {len(rollout.token_ids)} tokens, more than max_completion_length="
                    f"{max_completion_length}: it must stop there."
                )
            if min(rollout.versions) < 0:
                raise EngineError(
                    f"{where} with tokens of version -1, which no policy sampled: such tokens (of tools, for example) "
                    "cannot be trained with yet, so the engine must leave them out."
                )


def has_reward(groups: Sequence[Group]) -> bool:
    """Whether a reward function has scored one of the completions."""
    return not all(math.isnan(reward) for group in groups for row in group.score.rewards for reward in row)


def check_some_reward(scored: bool, names: Sequence[str]) -> None:
    """Raise `RewardError` unless a reward function has `scored` a completion of the generation batch."""
    if not scored:
        raise RewardError(
            f"No completion of a generation batch got a reward: {', '.join(map(repr, names))} returned None for all "
            "of them, and there is nothing to train on. Have one return a number, or remove the rows to which none "
            "applies."
        )


def argument_names(trainer_class: type) -> list[str]:
    """Names of the constructor's arguments, in order, without `self`."""
    return list(inspect.signature(trainer_class.__init__).parameters)[1:]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
