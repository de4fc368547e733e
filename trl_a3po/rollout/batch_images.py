"""The stored images of a batch's rows, as a processor returns them for the whole batch.

Guarantees: `batch_fields` equals what the processor makes of all rows at once, to the last bit, wherever the processor
accepts such a batch; a row without images takes no image of another row.
"""

from collections.abc import Sequence

import torch

from trl_a3po.protocol.images import PER_TOKEN, PromptImages, joined, pads_rows


def batch_fields(
    images: Sequence[PromptImages | None], prompt_lengths: Sequence[int], like: PromptImages
) -> dict[str, torch.Tensor]:
    """The fields of B rows in one dictionary.

    Fields with a value per token are `(B, P)`, of the prompts alone, with zeros to the left of shorter ones. Fields of
    images are joined along their first axis; where the inner axes differ, as with tiles of images, zeros fill up the
    shorter ones. In families that pad the images of each row (`pads_rows`), a row without images has zeros, which the
    model skips.

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
    for row, part, length in zip(padded, parts, lengths, strict=True):
        if part is not None:
            of_prompt = part[0, :length]  # what follows belongs to the completion
            start = len(row) - length
            row[start : start + len(of_prompt)] = of_prompt
    return padded


def _joined(parts: Sequence[torch.Tensor | None], like: torch.Tensor, *, empty_rows: bool) -> torch.Tensor:
    given = [part for part in parts if part is not None]
    inner = given[0] if given else like
    empty = inner.new_zeros(int(empty_rows), *inner.shape[1:])
    return joined([empty if part is None else part for part in parts])
