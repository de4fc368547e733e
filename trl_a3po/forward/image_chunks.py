"""The images of a batch, divided as a forward divides its rows.

Guarantees: every row is run with its own images and no other; rows without images are run without the arguments that
hold images, also where the rest of the batch has some.
"""

from collections.abc import Iterator
from typing import Any

import torch
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from trl_a3po.protocol.images import PER_TOKEN

Chunk = tuple[slice, dict[str, Any]]  # of the rows, and their arguments


def image_chunks(arguments: dict[str, Any], rows: int, size: int | None) -> Iterator[Chunk]:
    """The multimodal arguments of `_get_per_token_logps_and_entropies` for each chunk of `size` rows.

    Args:
        arguments: those of `rows` rows; an argument may be `None`. Those that are `bool` are for every chunk.
        size: rows of a chunk; `None` for all.
    """
    for_all = {name: value for name, value in arguments.items() if isinstance(value, bool)}
    by_row = split_pixel_values_by_grid(
        {name: value for name, value in arguments.items() if value is not None and name not in for_all}
    )
    step = size or rows
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        of_chunk = {name: value[chunk] for name, value in by_row.items()}  # lists and tensors, of one entry a row
        yield chunk, for_all | _without_empty(unsplit_pixel_values_by_grid(of_chunk))


def _without_empty(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a chunk; if none of its rows has an image, only those of tokens."""
    mask: torch.Tensor | None = arguments.get("pixel_attention_mask")
    if len(arguments["pixel_values"]) and (mask is None or mask.any()):
        return arguments
    return {name: value for name, value in arguments.items() if name in PER_TOKEN}
