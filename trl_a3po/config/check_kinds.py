"""What kind of value a setting of TRL or transformers has, which they do not check: numbers and dictionaries.

Guarantees: a setting that counts has no fraction, and one that is written as 1e3 is 1000; no number is NaN, and only
limits that switch something off are infinite; text in place of a dictionary is JSON, or the name of a file
where it may be one.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any, get_origin, get_type_hints

import torch

from trl_a3po.config.annotations import members

MAY_BE_INFINITE = (
    *("max_grad_norm", "epsilon", "epsilon_high", "off_policy_mask_threshold", "entropy_coef_max"),  # never reached
    *("num_train_epochs", "eval_delay"),  # max_steps ends the run; there is no evaluation
)
NEVER_NONE = (
    *("learning_rate", "max_steps", "num_train_epochs", "max_grad_norm", "weight_decay", "seed"),
    *("beta", "epsilon", "num_iterations", "top_k", "gradient_accumulation_steps", "per_device_train_batch_size"),
)
"""Numbers without which training fails later. Of the others, TRL and transformers accept `None`."""
COUNTS = ("num_generations", "num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps")
"""Whole numbers of at least 1."""
FILES = ("accelerator_config", "deepspeed", "fsdp_config")
"""Dictionaries that may be the path of a JSON file."""


def check_kinds(settings: Any, declared: type | None = None) -> None:
    """Raise `ValueError` for the first value of a dataclass that is of another kind than its annotation says.

    Args:
        declared: the class whose fields are checked; by default that of `settings`.
    """
    hints = get_type_hints(declared or type(settings))
    for field in (field for field in fields(declared or settings) if field.init):
        value, kinds = getattr(settings, field.name), set(members(hints[field.name])) - {NoneType}
        if value is not None or field.name in NEVER_NONE:
            _check_value(field.name, value, kinds)
            if kinds == {int}:
                setattr(settings, field.name, int(value))


def _check_value(name: str, value: Any, kinds: set[Any]) -> None:
    if kinds == {list[float]}:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ValueError(f"{name}={value!r} must be a list of numbers.")
        for number in value:
            _check_number(name, value, number, whole=False)
    elif kinds in ({int}, {float}):
        _check_number(name, value, value, whole=kinds == {int})
    elif any(dict in (kind, get_origin(kind)) for kind in kinds):
        if isinstance(value, str):
            _check_dictionary(name, value)
        elif isinstance(value, Real):
            raise ValueError(f"{name}={value!r} is not a dictionary: write it as {name}='{{\"key\": value}}'.")


def _check_number(name: str, value: Any, number: Any, *, whole: bool) -> None:
    if isinstance(number, torch.Tensor) and number.ndim == 0:
        number = number.item()
    if number is True or not isinstance(number, Real):
        raise ValueError(f"{name}={value!r} must be a {'whole ' * whole}number.")
    if math.isnan(number) or (math.isinf(number) and name not in MAY_BE_INFINITE):
        raise ValueError(f"{name}={value!r} must be a finite number.")
    if whole and number != math.floor(number):
        raise ValueError(f"{name}={value!r} must be a whole number.")
    if name in COUNTS and number < 1:
        raise ValueError(f"{name}={value!r} must be at least 1.")


def _check_dictionary(name: str, text: str) -> None:
    """Text that begins with `{` is read as JSON by transformers, and other text as a path."""
    if text.startswith("{"):
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{name}={text!r} is not JSON ({error}): write it as {name}='{{\"key\": value}}', with double quotes "
                "around keys and texts."
            ) from error
    elif name not in FILES:
        raise ValueError(f"{name}={text!r} is not a dictionary: write it as {name}='{{\"key\": value}}'.")
    elif name != "deepspeed" and not Path(text).is_file():  # DeepSpeed's may also be encoded
        raise ValueError(f"{name}={text!r} is neither a dictionary in JSON nor a file: correct the path.")
