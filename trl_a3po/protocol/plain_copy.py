"""`plain_copy`: a row that other people's code may change."""

from typing import Any


def plain_copy(value: Any) -> Any:
    """A copy of nested lists and dictionaries. Everything else, such as an image, is shared with the original."""
    if type(value) is list:
        return [plain_copy(item) for item in value]
    if type(value) is dict:
        return {key: plain_copy(item) for key, item in value.items()}
    return value
