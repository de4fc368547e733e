"""The token that stands for a feature of an image."""

from typing import Any


def image_token_of(config: Any) -> int | None:
    """The id of a model's image token, under whichever name its configuration has it; `None` for a model of text."""
    name = config.attribute_map.get("image_token_id", "image_token_id")
    token: int | None = vars(config).get(name)
    return token
