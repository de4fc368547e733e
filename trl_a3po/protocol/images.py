"""`PromptImages`: the images of one prompt, as they travel from the prompt stream to an engine and to the trainer.

Guarantees: what an engine samples from and what the trainer trains on are the same arrays, made once per prompt.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a reward worker, which has no use for images, starts without torch
    import torch
    from PIL.Image import Image

PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
"""Fields that have a value per token."""


def pads_rows(fields: Container[str]) -> bool:
    """Whether the first axis of the images of a batch is that of its rows, as in Idefics 3 and SmolVLM, and not that
    of its images."""
    return "pixel_attention_mask" in fields and "spatial_shapes" not in fields


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """
    Args:
        images: the images, in the order in which the prompt shows them. vLLM reads their sizes alone.
        fields: what the processor made of this prompt alone, beside its token ids: the keyword arguments of the
            model's forward, such as `pixel_values` and `image_grid_thw`, as for a batch of one. Fields that have a
            value per token, such as `mm_token_type_ids`, are `(1, P)` for a prompt of P tokens.
    """

    images: tuple["Image", ...]
    fields: "dict[str, torch.Tensor]"

    def over(self, length: int, device: "torch.device") -> "dict[str, torch.Tensor]":
        """The fields on `device` for a sequence of `length` tokens that begins with the prompt: those with a value per
        token are extended by text."""
        import torch

        fields = {name: field.to(device, non_blocking=True) for name, field in self.fields.items()}
        for name in PER_TOKEN:
            if name in fields:
                fields[name] = torch.nn.functional.pad(fields[name], (0, length - fields[name].shape[-1]))
        return fields

    @property
    def nbytes(self) -> int:
        """Bytes of the fields, and of the images as decoded."""
        fields = sum(field.nbytes for field in self.fields.values())
        return fields + sum(image.width * image.height * len(image.getbands()) for image in self.images)
