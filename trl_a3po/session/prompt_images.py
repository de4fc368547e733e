"""The images of a prompt: from the columns and the messages of its row to what an engine and the trainer are given.

Guarantees: the processor sees every prompt once, alone; a prompt whose images cannot be read, or do not match its
tokens, is not sampled from (`UnusableImages`).
"""

import io
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trl.data_utils import prepare_multimodal_messages

from trl_a3po.checks.images import RefusedImages, UnreadableImage, UnusableImages, check_fields, check_placeholders
from trl_a3po.episodes.image_rules import ImageRules
from trl_a3po.protocol.images import PromptImages
from trl_a3po.rollout.prompt_stream import TokenizedPrompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from trl_a3po.trainer import A3POTrainer

Messages = list[dict[str, Any]]


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
        raise RefusedImages(f"The processor refuses a prompt and its images: {error}") from error
    token_ids = list(prompt_ids[0])
    check = partial(check_fields, trainer.processing_class, trainer.model)
    shown = messages if images_in_columns(row) is not None else None
    if not images or not images[0]:
        check(token_ids, None)
        return TokenizedPrompt(token_ids, None, shown)
    prompt_images = PromptImages.made(images[0], fields)
    check(token_ids, prompt_images)
    return TokenizedPrompt(token_ids, prompt_images, shown)


def image_rules(trainer: "A3POTrainer") -> ImageRules | None:
    """What episodes may do with images; `None` for a tokenizer."""
    if not trainer._is_vlm:
        return None
    processor: Any = trainer.processing_class
    names = ("image_token", "boi_token", "video_token")  # what processors put in the place of images
    tokens = [getattr(processor, name, None) for name in names]
    return ImageRules(
        opened=copied_image,
        shown=messages_with_images,
        check=partial(check_fields, processor, trainer.model),
        tokens=tuple(token for token in tokens if isinstance(token, str)),
    )


def copied_image(image: Any) -> "Image":
    """As `opened_image`, read and copied: an environment may go on to draw in the image that it has returned.

    Raises:
        UnreadableImage: it cannot be read.
    """
    opened = opened_image(image)
    try:
        return opened.copy()
    except (OSError, SyntaxError, ValueError) as error:
        raise UnreadableImage(f"An image cannot be read. {error}") from error


def opened_image(image: Any) -> "Image":
    """An image of a dataset: a PIL image, the path of a file, or a dictionary with `bytes` or a `path`, as
    `datasets.Image(decode=False)` gives it.

    Raises:
        UnreadableImage: it is none of these, or cannot be read.
    """
    from PIL import Image, UnidentifiedImageError  # which a run without images does not need

    if isinstance(image, Image.Image):
        return _of_some_size(image)
    source = image
    if isinstance(image, Mapping):
        source = io.BytesIO(image["bytes"]) if image.get("bytes") is not None else image.get("path")
    if isinstance(source, str) and (source.startswith("data:") or "://" in source):
        raise UnreadableImage(
            f"An image is given as the address {source[:60]!r}, which is not fetched during training: save the image "
            "in the dataset, in a column of type datasets.Image."
        )
    if not isinstance(source, str | io.BytesIO):
        raise UnreadableImage(
            f"An image is a {type(image).__name__}: give a PIL image, the path of a file, or a column of type "
            "datasets.Image."
        )
    try:
        opened = Image.open(source)
        opened.load()
    except (OSError, SyntaxError, ValueError) as error:
        where = "its bytes" if isinstance(source, io.BytesIO) else repr(source)
        # PIL's own words hold the address of the bytes, which differs from run to run.
        why = "It has no format that PIL knows." if isinstance(error, UnidentifiedImageError) else str(error)
        raise UnreadableImage(f"An image cannot be read from {where}: repair or remove it. {why}") from error
    return _of_some_size(opened)


def _of_some_size(image: "Image") -> "Image":
    if 0 in image.size:
        raise UnreadableImage("An image is {} × {} pixels large, so it shows nothing.".format(*image.size))
    return image


def _opened(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    parts = [{**part, "image": opened_image(part["image"])} if part["type"] == "image" else part for part in content]
    return {**message, "content": parts}
