"""The settings of a run, for its timeline.

Guarantees: JSON can hold every value; what may be a secret is `HIDDEN`: texts under a name such as `hub_token`, at any
depth, tokens of the hub, and the user and password of a URL.
"""

import re
from collections.abc import Mapping
from typing import Any

from trl_a3po.config import A3POConfig

HIDDEN = "<hidden>"
SECRET_NAME = re.compile(r"token$|password|passwd|secret|credential|authorization|cookie|api_?key", re.IGNORECASE)
SECRET_TEXT = re.compile(r"\bhf_\w{8,}|\bsk-[\w-]{16,}|(?<=://)[^/@\s]+(?=@)|(?<=Bearer )\S+")
LONGEST = 500  # characters of a value


def recorded_settings(args: A3POConfig) -> dict[str, Any]:
    """Every setting by its name."""
    settings: dict[str, Any] = _recorded("", args.to_dict())
    return settings


def _recorded(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _recorded(str(key), part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_recorded(name, part) for part in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return HIDDEN if SECRET_NAME.search(name) else SECRET_TEXT.sub(HIDDEN, str(value))[:LONGEST]
