"""The images of a prompt: from the columns and the messages of its row to what an engine and the trainer are given.

Guarantees: the processor sees every prompt once, alone; a prompt whose images cannot be read, or do not match its
tokens, is not sampled from (`UnusableImages`).
"""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trl.data_utils import prepare_multimodal_messages

from trl_a3po.checks.images import UnusableImages, check_fields, check_placeholders
from trl_a3po.protocol.images import PromptImages
from trl_a3po.rollout.prompt_stream import TokenizedPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from trl_a3po.trainer import A3POTrainer

Messages = list[dict[str, Any]]

TOKENS = ("input_ids", "attention_mask")


def images_in_columns(row: Mapping[str, Any]) -> list[Any] | None:
    """What the column `images`, or else `image`, of a row holds; `None` if the row has neither column. TRL reads the
    columns in this order."""
    if "images" in row:
        images = row["images"]
        if images is not None and not isinstance(images, list | tuple):
            raise UnusableImages(
                f"The column 'images' of a row holds a {type(images).__name__}: give a list of images, or name the "
                "column 'image'."
            )
        return list(images or [])
    if "image" in row:
        return [] if row["image"] is None else [row["image"]]
    return None


def messages_with_images(row: Mapping[str, Any]) -> Messages:
    """The prompt of a row as TRL shows it to a processor and to reward functions: every content a list of parts, and
    the images of the row's columns in their places.

    Raises:
        UnusableImages: an image cannot be read, or there are more or fewer images than places for them.
    """
    images = images_in_columns(row) or []
    check_placeholders(row["prompt"], images)
    return [_opened(message) for message in prepare_multimodal_messages(row["prompt"], images=images)]


def tokenized_with_images(trainer: "A3POTrainer", row: Mapping[str, Any]) -> TokenizedPrompt:
    """The prompt of a row for a processor: its tokens, its images and what the processor makes of them.

    Raises:
        UnusableImages: an image cannot be read, or the images do not match the tokens of the prompt.
    """
    messages = messages_with_images(row)
    try:
        prompt_ids, images, fields = trainer._tokenize_prompts([messages])
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise UnusableImages(f"The processor refuses a prompt and its images: {error}") from error
    token_ids = list(prompt_ids[0])
    shown = messages if images_in_columns(row) is not None else None
    if not images or not images[0]:
        check_fields(trainer, token_ids, None)
        return TokenizedPrompt(token_ids, None, shown)
    made = {name: as_tensor(value) for name, value in fields.items() if name not in TOKENS}
    prompt_images = PromptImages(tuple(images[0]), made)
    check_fields(trainer, token_ids, prompt_images)
    return TokenizedPrompt(token_ids, prompt_images, shown)


def as_tensor(field: Any) -> torch.Tensor:
    """A field of a processor's output for one prompt. Processors give an array, or a list of arrays of one shape."""
    return torch.as_tensor(np.asarray(field))


def opened_image(image: Any) -> "Image":
    """An image of a dataset: a PIL image, the path of a file, or a dictionary with `bytes` or a `path`, as
    `datasets.Image(decode=False)` gives it.

    Raises:
        UnusableImages: it is none of these, or cannot be read.
    """
    from PIL import Image  # which a run without images does not need

    if isinstance(image, Image.Image):
        return image
    source = image
    if isinstance(image, Mapping):
        source = io.BytesIO(image["bytes"]) if image.get("bytes") is not None else image.get("path")
    if isinstance(source, str) and (source.startswith("data:") or "://" in source):
        raise UnusableImages(
            f"An image is given as the address {source[:60]!r}, which is not fetched during training: save the image "
            "in the dataset, in a column of type datasets.Image."
        )
    if not isinstance(source, str | io.BytesIO):
        raise UnusableImages(
            f"An image is a {type(image).__name__}: give a PIL image, the path of a file, or a column of type "
            "datasets.Image."
        )
    try:
        opened = Image.open(source)
        opened.load()
    except (OSError, SyntaxError, ValueError) as error:
        where = "its bytes" if isinstance(source, io.BytesIO) else repr(source)
        raise UnusableImages(f"An image cannot be read from {where}: repair or remove the row. {error}") from error
    return opened


def _opened(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    parts = [{**part, "image": opened_image(part["image"])} if part["type"] == "image" else part for part in content]
    return {**message, "content": parts}
