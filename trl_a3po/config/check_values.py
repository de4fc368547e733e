"""Each setting by itself, and the few that need one another: choices, types, ranges of numbers, checkpoints, the
training forward.

Guarantees: what passes has the type and the range that its help gives; nothing is changed but numbers of NumPy, which
become Python's.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from trl_a3po.config.annotations import Annotation, annotations
from trl_a3po.objectives.table import OBJECTIVES
from trl_a3po.protocol.ranges import Range

if TYPE_CHECKING:
    from trl_a3po.config.a3po_config import A3POConfig

INHERITED_NUMBERS = (
    Annotation("temperature", float, range=Range(above=0)),
    Annotation("max_completion_length", int, range=Range(least=1)),
    Annotation("vllm_tensor_parallel_size", int, range=Range(least=1)),
)


def check_choices(config: "A3POConfig") -> None:
    """Raise `ValueError` for a value that is not among the choices of its setting."""
    choices = {annotation.name: (annotation.choices, annotation.optional) for annotation in annotations()}
    for name, (known, optional) in {**choices, "objective": (tuple(OBJECTIVES), False)}.items():
        value = getattr(config, name)
        if known and value not in known and not (optional and value is None):
            raise ValueError(f"{name}={value!r} is not known: set one of {', '.join(map(repr, known))}.")


def check_types(config: "A3POConfig") -> None:
    """Raise `ValueError` for a flag that is not a `bool`, and for a name, path or list of names of another type."""
    for name in (annotation.name for annotation in annotations() if annotation.type is bool):
        value = getattr(config, name)
        if type(value) is not bool:  # "no" would count as True
            raise ValueError(f"{name}={value!r} must be True or False.")
    _check_names(config)
    for name, what, default in (
        ("vllm_weights_dir", "the path of a folder, as text", "output_dir/vllm"),
        ("vllm_python", "the path of an interpreter, as text", "this one"),
    ):
        value = getattr(config, name)
        if not (value is None or _is_text(value)):
            raise ValueError(f"{name}={value!r} must be {what}; leave it out for {default}.")


def _check_names(config: "A3POConfig") -> None:
    """Devices and URLs: one name, or a list of names."""
    device: object = config.engine_device
    if not (device is None or _is_text(device) or _is_texts(device)):
        example = f"cuda:{device}" if type(device) is int and device >= 0 else "cuda:0"
        raise ValueError(
            f"engine_device={device!r} must be the name of a device, such as {example!r}, or a list of names; leave "
            "it out to follow the trainer."
        )
    urls = config.vllm_server_urls
    if not (urls is None or _is_text(urls) or _is_texts(urls)):
        raise ValueError(
            f"vllm_server_urls={urls!r} must be a list of URLs, such as ['http://localhost:8000']; leave it out to "
            "have a server started."
        )


def check_checkpoints(config: "A3POConfig") -> None:
    """Raise `ValueError` for checkpoints that could not be resumed from."""
    if config.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True would leave machines with checkpoints that lack the queue, which the main process "
            "alone writes: set save_on_each_node=False, and output_dir to a folder that they share."
        )


def check_numbers(config: "A3POConfig") -> None:
    """Raise `ValueError` for a number outside the range of its setting."""
    for annotation in (*annotations(), *INHERITED_NUMBERS):
        value = getattr(config, annotation.name)
        if isinstance(value, np.generic):
            setattr(config, annotation.name, value := value.item())
        if not (annotation.optional and value is None):
            _check_number(annotation, value)
    _check_cap(config)
    if config.reward_on_timeout is not None:
        _check_reward_on_timeout(config, config.reward_on_timeout)


def _check_number(annotation: Annotation, value: Any) -> None:
    if annotation.range is None:
        return
    if annotation.type is int:
        if type(value) is not int or value not in annotation.range:
            raise ValueError(f"{annotation.name}={value!r} must be a whole number of {annotation.range}.")
    elif not (_is_number(value) and value in annotation.range):
        raise ValueError(f"{annotation.name}={value!r} must be a finite number {annotation.range}.")


def check_forward(config: "A3POConfig") -> None:
    """Raise `ValueError` for a prompt that is to be shared where no two completions of it meet."""
    if config.shared_prompt != "on":
        return
    if config.packed_forward == "off":
        raise ValueError(
            "shared_prompt='on' with packed_forward='off' cannot hold, because a prompt is shared in a packed "
            "row: set packed_forward='auto', or shared_prompt='off'."
        )
    if config.per_device_train_batch_size == 1:
        raise ValueError(
            "shared_prompt='on' with per_device_train_batch_size=1 has nothing to share: set it to "
            f"num_generations={config.num_generations}, or to a part or a multiple of it, or set "
            "shared_prompt='auto'."
        )


def _check_cap(config: "A3POConfig") -> None:
    if not _is_number(config.behavior_weight_cap):
        raise ValueError(
            f"behavior_weight_cap={config.behavior_weight_cap!r} must be a number above 1; set "
            "behavior_weight_mode='none' for no cap."
        )
    if config.behavior_weight_mode != "none" and not config.behavior_weight_cap > 1:
        raise ValueError(
            f"behavior_weight_cap={config.behavior_weight_cap!r} would change tokens whose policies agree (w = 1): "
            "set a cap above 1, or behavior_weight_mode='none' for no cap."
        )


def _check_reward_on_timeout(config: "A3POConfig", value: float) -> None:
    if not (_is_number(value) and math.isfinite(value)):
        raise ValueError(f"reward_on_timeout={value!r} must be a finite number; None rejects the group.")
    if config.reward_timeout is None:
        raise ValueError(
            f"reward_on_timeout={value!r} without a reward_timeout would never be used for a function that hangs: "
            "set reward_timeout, or leave reward_on_timeout out."
        )
    if not config.reward_workers:
        raise ValueError(
            f"reward_on_timeout={value!r} with reward_workers=0 cannot be used, because a thread that hangs "
            "cannot be killed: set reward_workers to 1 or more, or leave reward_on_timeout out."
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
