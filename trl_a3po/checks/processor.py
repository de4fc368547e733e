"""Checks that a processor goes with the model that is given what it makes of images."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import ProcessorMixin

from trl_a3po.models.image_token import image_token_of
from trl_a3po.models.unwrap import base_model

SAME = (  # settings of a processor and of a model's configuration
    ("image_processor.patch_size", "vision_config.patch_size"),  # Qwen-VL
    ("image_processor.merge_size", "vision_config.spatial_merge_size"),
    ("image_processor.temporal_patch_size", "vision_config.temporal_patch_size"),
    ("image_processor.size.height", "vision_config.image_size"),  # Gemma 3
    ("image_seq_length", "mm_tokens_per_image"),
    ("image_processor.crop_size.height", "vision_config.image_size"),  # LLaVA-NeXT
    ("patch_size", "vision_config.patch_size"),
)


def check_shows_images(processor: ProcessorMixin, config: Any) -> None:
    """Raise `ValueError` for a processor with a model of text, or with a setting that would have no effect.

    Args:
        config: of the model.
    """
    if image_token_of(config) is None:
        raise ValueError(
            f"processing_class is a {type(processor).__name__}, which shows images, but the model's configuration, a "
            f"{type(config).__name__}, has no image token: pass processing_class.tokenizer to train on text, or a "
            "vision-language model."
        )
    if processor.image_processor.to_dict().get("do_pan_and_scan"):
        raise ValueError(
            "processing_class.image_processor.do_pan_and_scan=True cannot hold: TRL could not tell the crops from "
            "images of other rows, and prepares images without them. Set do_pan_and_scan=False, and larger images "
            "in place of crops."
        )


def check_processor(processor: Any, model: Any, fields: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` for a processor that is not the model's own, as far as its settings tell.

    Args:
        fields: what the processor has made of a prompt with images.
    """
    base = base_model(model)
    others = sorted(set(fields) - set(inspect.signature(type(base).forward).parameters))
    wrong = f"makes {', '.join(others)} of images, which the model does not take" if others else None
    wrong = wrong or next(_differences(processor, base.config, fields), None)
    if wrong is not None:
        raise ValueError(
            f"processing_class is a {type(processor).__name__} and the model a {type(base).__name__}, which do not go "
            f"together: the processor {wrong}. Pass the model's own processor (AutoProcessor.from_pretrained with the "
            "name of the model), or set what differs."
        )


def _differences(processor: Any, config: Any, fields: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name, there in SAME:
        ours, models = _setting(processor, name), _setting(config, there)
        if ours is not None and models is not None and ours != models:
            yield f"has {name}={ours}, and the model {there}={models}"
    tokens, scale = _setting(processor, "image_seq_len"), _setting(config, "scale_factor")
    if tokens is not None and scale is not None:  # Idefics 3, SmolVLM
        height, width = fields["pixel_values"].shape[-2:]
        patch = config.vision_config.patch_size
        features = (height // patch) * (width // patch) // scale**2
        if tokens != features:
            made = f"{features} features of a tile of {height} x {width}"
            yield f"has image_seq_len={tokens}, and the model makes {made}"


def _setting(owner: Any, path: str) -> Any:
    """The value at `path`, `None` where there is none."""
    for name in path.split("."):
        owner = None if owner is None else (owner if isinstance(owner, dict) else vars(owner)).get(name)
    return owner
