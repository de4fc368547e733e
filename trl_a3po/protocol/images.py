"""`PromptImages`: the images of one prompt, or of one rollout, as they travel to an engine and to the trainer.

Guarantees: what an engine samples from and what the trainer trains on are the same arrays, made once per prompt, and
once for each image that a later turn adds.
"""

import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # a reward worker, which has no use for images, starts without torch
    import torch
    from PIL.Image import Image

PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
"""Fields that have a value per token."""
TOKENS = ("input_ids", "attention_mask")
"""What a processor makes of every prompt, beside the fields of its images."""


def is_image(value: Any) -> bool:
    """Whether `value` is an image of Pillow."""
    pil = sys.modules.get("PIL.Image")  # which is imported wherever there is an image
    return pil is not None and isinstance(value, pil.Image)


def pads_rows(fields: Container[str]) -> bool:
    """Whether the first axis of the images of a batch is that of its rows, as in Idefics 3 and SmolVLM, and not that
    of its images."""
    return "pixel_attention_mask" in fields and "spatial_shapes" not in fields


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """
    Args:
        images: the images, in the order in which the prompt, and what follows it, show them. vLLM reads their sizes
            alone.
        fields: what the processor made of this prompt alone, beside its token ids: the keyword arguments of the
            model's forward, such as `pixel_values` and `image_grid_thw`, as for a batch of one. Fields that have a
            value per token, such as `mm_token_type_ids`, are `(1, P)` for P tokens, up to the last image or further.
        added: of a later turn, the images that are new in it, which are the last of `images`; its fields are those of
            these images alone. `None`: there are none.
    """

    images: tuple["Image", ...]
    fields: "dict[str, torch.Tensor]"
    added: "PromptImages | None" = None

    @classmethod
    def made(cls, images: Sequence["Image"], made: Mapping[str, Any]) -> Self:
        """The images of one prompt, of which a processor has made `made`: arrays, or lists of arrays of one shape."""
        import numpy as np
        import torch

        fields = {name: torch.as_tensor(np.asarray(value)) for name, value in made.items() if name not in TOKENS}
        return cls(tuple(images), fields)

    def over(self, length: int, device: "torch.device") -> "dict[str, torch.Tensor]":
        """The fields on `device` for a sequence of `length` tokens that begins with the prompt: those with a value per
        token are extended by text."""
        import torch

        fields = {name: field.to(device, non_blocking=True) for name, field in self.fields.items()}
        for name in PER_TOKEN:
            if name in fields:
                fields[name] = torch.nn.functional.pad(fields[name], (0, length - fields[name].shape[-1]))
        return fields

    def nothing_added(self) -> "PromptImages":
        """The same images, none of which is new."""
        return self if self.added is None else replace(self, added=None)

    @property
    def nbytes(self) -> int:
        """Bytes of the fields, and of the images as decoded."""
        fields = sum(field.nbytes for field in self.fields.values())
        return fields + sum(image.width * image.height * len(image.getbands()) for image in self.images)


def grown(before: PromptImages | None, new: PromptImages, start: int) -> PromptImages:
    """The images of a sequence that `new` is added to.

    Args:
        before: those of the sequence so far, which may be new in this turn themselves.
        new: those of the tokens that are added. Its fields with a value per token begin with the first of them.
        start: how many tokens come before.
    """
    added = None if before is None else before.added
    fields = {name: _appended(name, before, new, start) for name in new.fields}
    both = new if added is None else _together(added, new)
    return PromptImages((*(() if before is None else before.images), *new.images), fields, both)


def joined(parts: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """Arrays joined along their first axis. Where the inner axes differ, zeros fill up the shorter ones."""
    inner = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    whole, start = parts[0].new_zeros(sum(map(len, parts)), *inner), 0
    for part in parts:
        whole[(slice(start, start + len(part)), *(slice(size) for size in part.shape[1:]))] = part
        start += len(part)
    return whole


def _appended(name: str, before: PromptImages | None, new: PromptImages, start: int) -> "torch.Tensor":
    field = new.fields[name]
    if name not in PER_TOKEN:
        return field if before is None else _images_joined(name, before, new)
    whole = field.new_zeros(1, start + field.shape[1])
    whole[:, start:] = field
    if before is not None:
        whole[:, : before.fields[name].shape[1]] = before.fields[name]
    return whole


def _together(one: PromptImages, other: PromptImages) -> PromptImages:
    """Images that are added by one turn, without what has a value per token."""
    names = [name for name in other.fields if name not in PER_TOKEN]
    fields = {name: _images_joined(name, one, other) for name in names}
    return PromptImages((*one.images, *other.images), fields)


def _images_joined(name: str, one: PromptImages, other: PromptImages) -> "torch.Tensor":
    parts = [one.fields[name], other.fields[name]]
    return joined([part[0] for part in parts])[None] if pads_rows(other.fields) else joined(parts)
