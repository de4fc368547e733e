"""TRL's forward of rows with images, divided into chunks of rows.

Guarantees: every row is run with its own images and no other; rows without images are run without the arguments that
hold images, also where the rest of the batch has some.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from trl_a3po.protocol.images import PER_TOKEN, pads_rows

Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def forward_with_images(
    forward: Callable[..., Outputs],
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *,
    batch_size: int | None,
    images: dict[str, Any],
    **options: bool,
) -> Outputs:
    """What `forward`, TRL's method, returns, with the images of each chunk of `batch_size` rows.

    Args:
        images: the multimodal arguments of TRL's method, of which some may be `None`.
        options: the arguments of TRL's method that are for every chunk.
    """
    if images.get("pixel_values") is None:
        arguments = (model, input_ids, attention_mask, logits_to_keep)
        return forward(*arguments, batch_size=batch_size, **options, **images)
    chunks = image_chunks(images, len(input_ids), batch_size or len(input_ids))
    parts = [
        forward(model, input_ids[rows], attention_mask[rows], logits_to_keep, **options, **of_rows)
        for rows, of_rows in chunks
    ]
    logps, entropies, losses = zip(*parts, strict=True)
    return (
        torch.cat(logps),
        None if entropies[0] is None else torch.cat(entropies),
        None if losses[0] is None else torch.stack(losses).mean(),
    )


def image_chunks(images: dict[str, Any], rows: int, size: int) -> Iterator[tuple[slice, dict[str, Any]]]:
    """The multimodal arguments for each chunk of `size` of the `rows` rows."""
    given = {name: value for name, value in images.items() if value is not None}
    if pads_rows(given):  # TRL would take the rows for images wherever there happen to be as many
        given["num_images"] = [1] * rows
    by_row = split_pixel_values_by_grid(given)
    for start in range(0, rows, size):
        chunk = slice(start, start + size)
        of_chunk = {name: value[chunk] for name, value in by_row.items()}  # lists and tensors, of one entry a row
        yield chunk, _without_empty(unsplit_pixel_values_by_grid(of_chunk))


def _without_empty(images: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a chunk; if none of its rows has an image, only those of tokens."""
    mask: torch.Tensor | None = images.get("pixel_attention_mask")
    if len(images["pixel_values"]) and (mask is None or mask.any()):
        return images
    return {name: value for name, value in images.items() if name in PER_TOKEN}
