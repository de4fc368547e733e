"""What the forward of a vision-language model takes beside token ids: the fields of a prompt's images, and positions.

Guarantees: positions are a function of one sequence alone. Nothing is kept on the module between two forwards, as
`generate` keeps Qwen's rope deltas, which are wrong for slots of different requests.
"""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from trl_a3po.protocol.images import PER_TOKEN, PromptImages


class ImageInputs:
    """Of sequences that begin with a prompt, one at a time.

    Args:
        model: the base model.
        device: where its inputs go.

    Attributes:
        planes: coordinates of a position. They are equal for text and differ inside an image.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self._accepted = set(inspect.signature(type(model).forward).parameters)
        self._name = type(model).__name__
        self._device = device
        # Qwen's: "multimodal rope", https://arxiv.org/abs/2409.12191
        self._rope_index: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        if "mrope_section" in rope:
            self._rope_index = cast(Any, model.model).get_rope_index
        self.planes = 1 if self._rope_index is None else 3

    def check(self, images: PromptImages, prompt_tokens: int) -> None:
        """Raise `ValueError` for fields that the model's forward does not take, or that belong to another prompt."""
        if unknown := sorted(set(images.fields) - self._accepted):
            raise ValueError(
                f"The processor makes {unknown} of a prompt's images, which {self._name} does not take: the processor "
                "belongs to another model. Pass the processing_class of this model."
            )
        for name in PER_TOKEN:
            if name in images.fields and images.fields[name].shape[-1] > prompt_tokens:
                raise ValueError(
                    f"{name} has {images.fields[name].shape[-1]} values for a prompt of {prompt_tokens} tokens: they "
                    "were made of another prompt."
                )

    def places(self, ids: torch.Tensor, fields: dict[str, torch.Tensor], tokens: int) -> tuple[torch.Tensor, int]:
        """The positions, as `positions` gives them, of a padded sequence `(1, L)` whose first `tokens` are real, and
        how far the positions of the text behind them are ahead of their places."""
        places = torch.arange(ids.shape[1], device=self._device)[None]
        if self._rope_index is None or "image_grid_thw" not in fields:
            return self.positions(places), 0
        real = slice(None), slice(tokens)
        of_kind = {"mm_token_type_ids": fields["mm_token_type_ids"][real]}
        index, delta = self._rope_index(ids[real], image_grid_thw=fields["image_grid_thw"], **of_kind)
        positions = self.positions(places).clone()
        positions[:, :, :tokens] = index
        return positions, int(delta)

    def added(self, images: PromptImages, whole: dict[str, torch.Tensor], start: int) -> dict[str, torch.Tensor]:
        """The fields of the images that a sequence has `added`, for its tokens from `start` on.

        Args:
            whole: the fields of the whole sequence.
        """
        assert images.added is not None, "there are added images"
        per_token = {name: field[:, start:] for name, field in whole.items() if name in PER_TOKEN}
        new = {name: field.to(self._device, non_blocking=True) for name, field in images.added.fields.items()}
        return new | per_token

    def blocks(self, whole: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """`(1, L)`: the number of the image that each token belongs to, from 1 on, and 0 for text; `None` where
        attention does not look both ways within an image."""
        kinds = whole.get("token_type_ids")  # Gemma 3
        if kinds is None:
            return None
        shown = kinds == 1
        begins = shown & ~torch.nn.functional.pad(shown, (1, 0))[:, :-1]
        return begins.cumsum(1) * shown

    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions `(N, E)` of text in the shape that the model takes."""
        return positions if self._rope_index is None else positions[None].expand(3, *positions.shape)
