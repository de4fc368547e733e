"""The stored images of a batch's rows, as a processor returns them for the whole batch.

Guarantees: `batch_fields` equals what the processor makes of all rows at once, to the last bit, wherever the processor
accepts such a batch; a row without images takes no image of another row.
"""

from collections.abc import Sequence

import torch

from trl_a3po.protocol.images import PER_TOKEN, PromptImages, pads_rows


def batch_fields(
    images: Sequence[PromptImages | None], prompt_lengths: Sequence[int], like: PromptImages
) -> dict[str, torch.Tensor]:
    """The fields of B rows in one dictionary.

    Fields with a value per token are `(B, P)`, with zeros to the left of shorter prompts. Fields of images are joined
    along their first axis; where the inner axes differ, as with tiles of images, zeros fill up the shorter ones. In
    families that pad the images of each row (`pads_rows`), a row without images has zeros, which the model skips.

    Args:
        images: of each row.
        prompt_lengths: tokens of each row's prompt.
        like: images of some prompt of the run, whose fields the batch has, also if none of its rows has images.
    """
    batch = {}
    for name, field in like.fields.items():
        parts = [None if one is None else one.fields[name] for one in images]
        if name in PER_TOKEN:
            batch[name] = _left_padded(parts, prompt_lengths, field)
        else:
            batch[name] = _joined(parts, field, empty_rows=pads_rows(like.fields))
    return batch


def _left_padded(parts: Sequence[torch.Tensor | None], lengths: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    padded = like.new_zeros(len(parts), max(lengths))
    for row, part in zip(padded, parts, strict=True):
        if part is not None:
            row[len(row) - part.shape[1] :] = part[0]
    return padded


def _joined(parts: Sequence[torch.Tensor | None], like: torch.Tensor, *, empty_rows: bool) -> torch.Tensor:
    given = [part for part in parts if part is not None] or [like]
    inner = [max(sizes) for sizes in zip(*(part.shape[1:] for part in given), strict=True)]
    number = sum(empty_rows if part is None else len(part) for part in parts)
    joined, start = like.new_zeros(number, *inner), 0
    for part in parts:
        if part is not None:
            place = (slice(start, start + len(part)), *(slice(size) for size in part.shape[1:]))
            joined[place] = part
        start += empty_rows if part is None else len(part)
    return joined
