"""Checks of the arguments of `A3POTrainer`, before anything is built.

Guarantees: an argument that cannot be trained with raises an error that names it, wherever the argument alone shows
that; nothing is changed.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
from accelerate.utils import is_compiled_module
from peft import PeftModel
from transformers import AutoConfig, PreTrainedModel, ProcessorMixin
from trl.trainer.utils import get_callable_name

from trl_a3po.checks.policy import check_parallelism
from trl_a3po.checks.processor import check_shows_images
from trl_a3po.checks.vllm_python import check_vllm_python
from trl_a3po.config import A3POConfig
from trl_a3po.config.check_engine import check_engine
from trl_a3po.models.unwrap import base_model
from trl_a3po.rewards.messages import pickled_functions
from trl_a3po.rewards.scorer import is_async

CONFIG_KWARGS = ("revision", "trust_remote_code", "cache_dir", "token", "local_files_only", "subfolder")


def check_arguments(
    model: Any,
    reward_funcs: Any,
    args: A3POConfig,
    *,
    processing_class: Any,
    tools: Any,
    rollout_func: Any,
    environment_factory: Any,
) -> None:
    """Raise `TypeError` or `ValueError` for arguments of `A3POTrainer` that cannot be trained with."""
    if not isinstance(args, A3POConfig):
        raise TypeError(f"args is a {type(args).__name__}: pass an A3POConfig, which takes every field of GRPOConfig.")
    check_engine(args)  # which may have been set after the configuration was made
    check_vllm_python(args)
    _check_rollout_func(rollout_func, tools=tools, environment_factory=environment_factory)
    _check_tools(tools)
    _check_factory(environment_factory)
    if args.parallelism_config is not None:
        split = args.parallelism_config
        check_parallelism(split.tp_size, split.cp_size, split.sp_size)
    check_processing_class(processing_class)
    if not isinstance(model, str):
        _check_model_object(model)
        if processing_class is None and not model.config._name_or_path:
            raise ValueError(
                f"processing_class was left out, but the model, a {type(model).__name__}, has no name to load its "
                "tokenizer by, because it was built from a configuration: pass processing_class."
            )
    if isinstance(processing_class, ProcessorMixin):
        check_shows_images(processing_class, _config_of(model, args))
    for func in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if func is not None and not isinstance(func, str) and not callable(func):
            raise TypeError(
                f"reward_funcs holds {func!r}, which cannot be called: pass functions, reward models or their names."
            )


def check_processing_class(processing_class: Any) -> None:
    """Raise `ValueError` for a processor without images, such as one of sound."""
    if isinstance(processing_class, ProcessorMixin) and "image_processor" not in processing_class.get_attributes():
        raise ValueError(
            f"processing_class is a {type(processing_class).__name__}, which prepares no images: only text and images "
            "are supported. Pass a text model and its tokenizer, or a vision-language model and its processor."
        )


def check_outside_training(rollout_func: Any) -> None:
    """Raise `ValueError` for an evaluation outside of training of a trainer with a rollout function."""
    if rollout_func is not None:
        raise ValueError(
            "evaluate() outside of train() cannot play the episodes of rollout_func, because no engine runs then: "
            "evaluate during training, with eval_strategy and eval_steps."
        )


def check_on_group(on_group: Any) -> None:
    if on_group is not None and not callable(on_group):
        raise TypeError(f"on_group={on_group!r} is not a function: pass one that takes a finished group.")


def check_environments(
    args: A3POConfig,
    functions: Sequence[Callable[..., Any] | None],
    names: Sequence[str],
    factories: Mapping[str | None, Any],
) -> None:
    """Raise `ValueError` for a reward function that asks for environments which it cannot be given, and for an
    environment that cannot be made in a process of its own."""
    asking = [
        name
        for function, name in zip(functions, names, strict=True)
        if function is not None and "environments" in _parameters(function)
    ]
    if args.reward_workers and asking:
        raise ValueError(
            f"reward_workers={args.reward_workers}, but the reward function {asking[0]!r} asks for `environments`, "
            "which stay in the training process: set reward_workers=0, or let the environment give the reward in "
            "get_reward()."
        )
    if not args.environment_processes:
        return
    if asking:
        raise ValueError(
            f"environment_processes=True, but the reward function {asking[0]!r} asks for `environments`, which are in "
            "other processes: let the environment give the reward in get_reward(), or set environment_processes=False."
        )
    for name, factory in factories.items():
        which = "environment_factory" if name is None else f"the environment factory {name!r}"
        try:
            cloudpickle.dumps(factory)
        except Exception as error:
            raise ValueError(
                f"environment_processes=True, but {which} cannot be sent to a process: {error!r}. Create what cannot "
                "be pickled in the environment's __init__, or set environment_processes=False."
            ) from error


def check_tool_names(tools: Sequence[Any], of_environments: Mapping[str | None, Sequence[Any]]) -> None:
    """Raise `ValueError` for a method of an environment with the name of a tool, by which the policy calls both."""
    names = {get_callable_name(tool) for tool in tools}
    for every in of_environments.values():
        methods = [tool.__name__ for tool in every if tool not in tools]
        if both := sorted(names.intersection(methods)):
            raise ValueError(
                f"tools and environment_factory both hold {both[0]!r}, and the policy calls a tool by its name: "
                "rename the tool, or the method of the environment."
            )


def check_reward_functions(
    args: A3POConfig, functions: Sequence[Callable[..., Any] | None], names: Sequence[str]
) -> None:
    """Raise `RewardError` for a reward function that cannot be sent to a worker, and `ValueError` for a reward model,
    whose rewards come too late for the filter of groups. `None` stands for a reward model."""
    if args.reward_workers:
        pickled_functions(functions, names)
    if args.drop_zero_variance_groups and None in functions:
        raise ValueError(
            f"drop_zero_variance_groups=True, but the reward model {names[functions.index(None)]!r} runs after a "
            "batch has been taken, when its groups can no longer be replaced: set drop_zero_variance_groups=False."
        )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a function without a signature
        return {}


def _config_of(model: Any, args: A3POConfig) -> Any:
    """The configuration of a model, or of the model with this name, as TRL will load it."""
    if not isinstance(model, str):
        return model.config
    given = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    return AutoConfig.from_pretrained(model, **{name: given[name] for name in CONFIG_KWARGS if name in given})


def _check_rollout_func(rollout_func: Any, **others: Any) -> None:
    if rollout_func is None:
        return
    if not is_async(rollout_func):
        raise ValueError(
            "rollout_func is a function of prompts and a trainer, which samples in the training process. The policy "
            "is trained there meanwhile, and such samples would have no versions. Write it as `async def "
            "rollout(episode)`, which plays one episode: `turn = await episode.sample(messages)` samples from the "
            "engine, and the function returns the reward. docs/agents.md says what each part becomes."
        )
    for name, value in others.items():
        if value:
            raise ValueError(
                f"rollout_func and {name} cannot both be set: rollout_func plays whole episodes. Call the tools in "
                "it, and pass them to episode.sample(..., tools=...)."
            )


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list):
        raise TypeError(f"tools={tools!r} is not a list: pass a list of functions, also if there is only one.")
    for tool in tools:
        if not callable(tool):
            raise TypeError(f"tools holds {tool!r}, which cannot be called: pass functions.")
    names = [get_callable_name(tool) for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"tools holds {names.count(twice)} functions named {twice!r}, and the policy calls a tool by its name: "
            "give each one its own __name__."
        )


def _check_factory(factory: Any) -> None:
    """`environment_factory`, whose calls make environments."""
    named = factory.items() if isinstance(factory, Mapping) else [(None, factory)]
    for name, one in named:
        if one is None or callable(one):
            continue
        where = "environment_factory" if name is None else f"environment_factory[{name!r}]"
        raise TypeError(
            f"{where} is {one!r}, which cannot be called: each episode needs an environment of its own, so pass "
            f"what makes one, such as the class {type(one).__name__} itself."
        )


def _check_model_object(model: Any) -> None:
    if is_compiled_module(model):
        raise ValueError(
            "model was compiled by torch.compile: pass the original model and set torch_compile=True, which compiles "
            "only what is trained."
        )
    if not isinstance(model, (PreTrainedModel, PeftModel)):
        raise TypeError(
            f"model is a {type(model).__name__}: pass a model name, a folder, a PreTrainedModel or a PeftModel."
        )
    base = base_model(model)
    if not base.can_generate():
        raise ValueError(
            f"model is a {type(base).__name__}, which has no head to generate text: pass a causal language model, "
            "as AutoModelForCausalLM loads it."
        )
