"""What kind of value a setting of TRL or transformers has, which they do not check: numbers and dictionaries.

Guarantees: a setting that counts has no fraction, and one that is written as 1e3 is 1000; no number is NaN, and only
limits that switch something off are infinite or `None`; text in place of a dictionary is JSON, or the name of a file
where it may be one.
"""

import json
import math
from dataclasses import fields
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any, get_origin, get_type_hints

from trl_a3po.config.annotations import members

MAY_BE_INFINITE = ("max_grad_norm", "epsilon_high")
"""Limits that are never reached then."""
MAY_BE_NONE = ("max_grad_norm", "top_p", "top_k", "repetition_penalty")
"""What the Trainer and `generate` do not do then, whatever the annotation says."""
FILES = ("accelerator_config", "deepspeed", "fsdp_config")
"""Dictionaries that may be the path of a JSON file."""


def check_kinds(settings: Any, declared: type | None = None) -> None:
    """Raise `ValueError` for the first value of a dataclass that is of another kind than its annotation says.

    Args:
        declared: the class whose fields are checked; by default that of `settings`.
    """
    hints = get_type_hints(declared or type(settings))
    for field in (field for field in fields(declared or settings) if field.init):
        value, kinds = getattr(settings, field.name), set(members(hints[field.name]))
        if value is not None or not (field.default is None or NoneType in kinds or field.name in MAY_BE_NONE):
            _check_value(field.name, value, kinds - {NoneType})
            if kinds - {NoneType} == {int}:
                setattr(settings, field.name, int(value))


def _check_value(name: str, value: Any, kinds: set[Any]) -> None:
    if kinds == {list[float]} and isinstance(value, list):
        for number in value:
            _check_number(name, value, number, whole=False)
    elif kinds in ({int}, {float}):
        _check_number(name, value, value, whole=kinds == {int})
    elif isinstance(value, str) and any(dict in (kind, get_origin(kind)) for kind in kinds):
        _check_dictionary(name, value)


def _check_number(name: str, value: Any, number: Any, *, whole: bool) -> None:
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ValueError(f"{name}={value!r} must be a {'whole ' * whole}number.")
    if math.isnan(number) or (math.isinf(number) and name not in MAY_BE_INFINITE):
        raise ValueError(f"{name}={value!r} must be a finite number.")
    if whole and number != math.floor(number):
        raise ValueError(f"{name}={value!r} must be a whole number.")


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
