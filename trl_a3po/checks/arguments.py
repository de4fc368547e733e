"""The arguments of `A3POTrainer`, refused before anything is built where they cannot be trained with.

Guarantees: what can be known of an argument alone is refused in its own words; nothing is changed.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.utils import is_compiled_module
from peft import PeftModel
from transformers import PreTrainedModel, ProcessorMixin

from trl_a3po.config import A3POConfig
from trl_a3po.rewards.messages import pickled_functions


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


def check_on_group(on_group: Any) -> None:
    if on_group is not None and not callable(on_group):
        raise TypeError(f"on_group is {on_group!r}: pass a function that is called with each finished group.")


def check_reward_functions(
    args: A3POConfig, functions: Sequence[Callable[..., Any] | None], names: Sequence[str]
) -> None:
    """Raise `RewardError` for a reward function that cannot reach a worker, and `ValueError` for reward models, whose
    rewards come too late for the filter; `None` stands for a reward model."""
    if args.reward_workers:
        pickled_functions(functions, names)
    if args.drop_zero_variance_groups and None in functions:
        raise ValueError(
            f"drop_zero_variance_groups=True, but the reward model {names[functions.index(None)]!r} runs when a batch "
            "has been taken, when its groups cannot be replaced any more: set drop_zero_variance_groups=False."
        )


def argument_names(trainer_class: type) -> list[str]:
    """Names of the constructor's arguments, in order, without `self`."""
    return list(inspect.signature(trainer_class.__init__).parameters)[1:]


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
