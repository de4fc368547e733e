"""The images of a batch, given to TRL instead of being made again.

Guarantees: what is trained on is what the engine was given; the trainer's processor is in its place again afterwards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trl_a3po.models.image_token import image_token_of
from trl_a3po.protocol.images import PER_TOKEN, PromptImages, pads_rows
from trl_a3po.rollout.batch_images import batch_fields
from trl_a3po.rollout.batch_rows import Row, images_of_row, pictures_of_row, prompt_ids_of
from trl_a3po.session.current_batch import CurrentBatch
from trl_a3po.session.temporarily import temporarily

if TYPE_CHECKING:
    from trl_a3po.session.checkpoint_hooks import CheckpointHooks


class Replayed:
    """What returns `fields` when it is called, and otherwise is `original`, but for these `attributes`."""

    def __init__(self, original: Any, fields: dict[str, torch.Tensor], **attributes: Any):
        self._original = original
        self._fields = fields
        vars(self).update(attributes)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return dict(self._fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def images_of(rows: Sequence[Row]) -> list[PromptImages | None]:
    """The images of each row."""
    return [images_of_row(row) for row in rows]


def pictures_of(batch: CurrentBatch) -> list[list[Any] | None] | None:
    """The images of each row's prompt as TRL lists them; `None` if no row of the batch has any, in no process: TRL
    gathers the images of all processes."""
    if batch.images is None:
        return None
    return [pictures_of_row(row)[0] or None for row in batch.rows or ()]


@contextmanager
def replayed_images(trainer: "CheckpointHooks", batch: CurrentBatch) -> Iterator[None]:
    """Inside, the trainer's processor returns the stored fields of the batch's rows.

    TRL asks the whole processor where only prompts show images. Where a completion does, it asks the image processor,
    and finds the tokens of images by their ids, which it knows of some families alone.
    """
    rows = batch.rows or ()
    if batch.images is None:
        yield
        return
    fields = batch_fields(images_of(rows), [len(prompt_ids_of(row)) for row in rows], batch.images)
    processor: Any = trainer.processing_class
    of_images = {name: field for name, field in fields.items() if name not in PER_TOKEN}
    replayed = Replayed(processor, fields, image_processor=Replayed(processor.image_processor, of_images))
    ids = {"_image_pad_token_id": image_token_of(trainer.model.config), "_video_pad_token_id": None}
    with temporarily(trainer, processing_class=replayed, **ids):
        yield


def later_pictures_of(rows: Sequence[Row]) -> list[list[Any]]:
    """The images of each row's completion."""
    return [pictures_of_row(row)[1] for row in rows]


def rows_for_trl(batch: CurrentBatch, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a batch as TRL can prepare them: it fails at a batch whose columns of images are all empty, unless
    each is an empty list."""
    if batch.images is not None:
        return inputs
    return [{**row, "images": []} if "image" in row or "images" in row else row for row in inputs]


def counted_by_row(batch: dict[str, Any]) -> None:
    """Have TRL move the images of a prepared batch with their rows. It reads `num_images` as the number of entries
    that each row has in `pixel_values`, which is one where rows are padded (`pads_rows`)."""
    if "pixel_values" in batch and pads_rows(batch):
        batch["num_images"] = [1] * len(batch["completion_ids"])
