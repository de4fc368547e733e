"""Checks of prompts with images: of a row, and of what a processor has made of it.

Guarantees: a prompt that passes has as many image tokens as the model will compute features for them, in every family
whose rule is known here; no other family passes with images.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trl_a3po.checks.processor import check_processor
from trl_a3po.models.image_token import image_token_of
from trl_a3po.protocol.images import PromptImages
from trl_a3po.rollout.batch_rows import Row, images_of_row
from trl_a3po.rollout.prompt_stream import TokenizedPrompt

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer

FAMILIES = "Qwen2.5-VL, Qwen3-VL, Gemma 3, Idefics 3, SmolVLM and LLaVA-NeXT"


class UnusablePrompt(ValueError):
    """A prompt that cannot be sampled from, in a dataset whose other prompts can.

    Attributes:
        reason: the kind of fault, in words that follow "rows", for counts of rows that are left out.
    """

    reason: str


class UnusableImages(UnusablePrompt):
    """A prompt whose images do not match it."""

    reason = "whose images do not match the prompt"


class UnreadableImage(UnusableImages):
    """An image that cannot be read."""

    reason = "with an unreadable image"


class RefusedImages(UnusableImages):
    """A prompt that the processor refuses."""

    reason = "that the processor refuses"


def check_placeholders(prompt: Any, images: Sequence[Any]) -> None:
    """Raise `UnusableImages` unless the messages of a prompt have one place for each image of the row's columns.

    Messages of text alone have such places: TRL puts the images before the first text of the user.
    """
    contents = [message.get("content") for message in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    addresses = [part for part in parts if part["type"] == "image" and part.get("url")]
    if addresses:
        raise UnreadableImage(
            f"A message shows the image {addresses[0]['url']!r} by its address, which is not fetched during training: "
            "put the image itself under 'image', or into the column 'images'."
        )
    places = sum(part["type"] == "image" and "image" not in part for part in parts)
    texts = any(message["role"] == "user" and isinstance(message.get("content"), str) for message in prompt)
    if places != len(images) and not (texts and not places):
        raise UnusableImages(
            f"The row has {len(images)} images, but its messages have places for {places}: put one "
            "{'type': 'image'} into a message for each image, or give the contents as text."
        )


def check_fields(processor: Any, model: Any, token_ids: Sequence[int], images: PromptImages | None) -> None:
    """Raise `UnusableImages` unless the tokens of a prompt have one image token for each feature that the model makes
    of its images, and `ValueError` for a family of models whose number of features is not known."""
    found, expected = image_token_count(model.config, token_ids), 0
    if images is not None:
        expected = feature_count(processor, images)
        check_processor(processor, model, images.fields)
    if found == expected:
        return
    shown = 0 if images is None else len(images.images)
    reason = (
        "the chat template shows no image, so give processing_class the chat template of the model's processor"
        if found == 0
        else "a text may contain the image token itself"
    )
    raise UnusableImages(
        f"A prompt with {shown} images has {found} image tokens, but the model makes {expected} features of its "
        f"images: {reason}."
    )


def image_token_count(config: Any, token_ids: Sequence[int]) -> int:
    """How many tokens of a prompt stand for images, for the model with this configuration."""
    image_token = image_token_of(config)
    return sum(token == image_token for token in token_ids)


def overlong_images(trainer: "A3POTrainer", prompt: TokenizedPrompt) -> str | None:
    """How to shorten a prompt with images, in words; `None` for a prompt without images."""
    if prompt.images is None:
        return None
    count, images = image_token_count(trainer.model.config, prompt.token_ids), prompt.images.images
    sizes = ", ".join(f"{image.width} x {image.height}" for image in images[:4]) + (", …" if len(images) > 4 else "")
    size = trainer.processing_class.image_processor.to_dict().get("size")
    return (
        f"{count} of the tokens show its images ({sizes} pixels). Show fewer or smaller images, or set a smaller "
        f"processing_class.image_processor.size (now {size}), where the number of tokens depends on it"
    )


def feature_count(processor: Any, images: PromptImages) -> int:
    """How many image tokens belong to the images of a prompt.

    Raises:
        ValueError: the processor is not one of a family that is known.
    """
    fields, names = images.fields, set(images.fields)
    if names == {"pixel_values", "image_grid_thw", "mm_token_type_ids"}:  # Qwen-VL
        return int(fields["image_grid_thw"].prod(-1).sum() // processor.image_processor.merge_size**2)
    if names == {"pixel_values", "token_type_ids"}:  # Gemma 3
        if len(fields["pixel_values"]) != len(images.images):
            raise ValueError(
                "The processor cuts images into crops (do_pan_and_scan=True), which TRL cannot tell from images of "
                "other rows: set processing_class.image_processor.do_pan_and_scan=False."
            )
        return len(fields["pixel_values"]) * int(processor.image_seq_length)
    if names == {"pixel_values", "pixel_attention_mask"}:  # Idefics 3, SmolVLM: padding has a mask of zeros
        return int(fields["pixel_attention_mask"].flatten(2).any(-1).sum()) * int(processor.image_seq_len)
    if names == {"pixel_values", "image_sizes"}:  # LLaVA-NeXT
        return int(sum(processor._get_num_multimodal_tokens(fields["image_sizes"].tolist())["num_image_tokens"]))
    raise ValueError(
        f"A {type(processor).__name__} makes {', '.join(sorted(names))} of a prompt with images, which is not known "
        f"here: use a model of {FAMILIES}, or train without images."
    )


def check_prepared_images(batch: Mapping[str, Any], images: Sequence[PromptImages | None]) -> None:
    """Raise `RuntimeError` unless a batch holds the images of all of its rows.

    Args:
        batch: as TRL has prepared it.
        images: of each row.
    """
    counts = [0 if one is None else len(one.images) for one in images]
    if not any(counts) and "pixel_values" not in batch:
        return
    pixels: torch.Tensor | None = batch.get("pixel_values")
    if pixels is None or batch.get("num_images") != counts:
        raise RuntimeError(
            f"The rows of a batch have {counts} images, but what was prepared for training holds "
            f"{'no images' if pixels is None else batch.get('num_images')}: an override of _tokenize_prompts, "
            "_generate or _generate_and_score_completions has changed them. It must return what super() returns."
        )


def check_mixed_images(rows: Sequence[Row], *, partitioned: bool) -> None:
    """Raise `ValueError` for a batch of which only some rows have images where the weights are partitioned over
    processes: one whose rows have none would not help the others to gather the weights of the vision tower."""
    without = sum(images_of_row(row) is None for row in rows)
    if partitioned and 0 < without < len(rows):
        raise ValueError(
            f"{without} of the {len(rows)} rows of a batch have no images, which DeepSpeed ZeRO-3 and FSDP cannot "
            "train together with rows that have some: give every row an image, or launch with DDP or ZeRO-2."
        )
