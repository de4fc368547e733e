"""The images of queued episodes in a checkpoint: bytes of PNG beside the values, and places among them in the values.

Guarantees: an image that several rollouts show is saved once; its pixels are those that the processor was given.
"""

import io
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

PLACE = "a3po_saved_image"  # the key of what stands in the values for an image
AS_PNG = ("1", "I", "I;16", "L", "LA", "P", "RGB", "RGBA")  # other modes become RGB, as in image processors


class SavedImages:
    """Collects images, which are known by their identity."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._images: list[Any] = []

    def place(self, image: Any) -> int:
        """The place of the image among those that are saved."""
        if id(image) not in self._places:
            self._places[id(image)] = len(self._images)
            self._images.append(image)
        return self._places[id(image)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """`images`, the bytes of all images, and `image_sizes`, how many bytes each has."""
        files = [_png(image) for image in self._images]
        data = bytearray(b"".join(files))
        return {
            "images": torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8),
            "image_sizes": torch.tensor([len(file) for file in files], dtype=torch.int64),
        }


def files_in(tensors: dict[str, torch.Tensor]) -> list[bytes]:
    """The images that `SavedImages.tensors` holds, as files.

    Raises:
        ValueError: the sizes are not those of the bytes.
    """
    if "images" not in tensors:
        return []
    sizes, data = tensors["image_sizes"].tolist(), tensors["images"].numpy().tobytes()
    if min(sizes, default=0) < 0 or sum(sizes) != len(data):
        raise ValueError(f"{len(sizes)} images have other sizes than the {len(data)} bytes that are saved of them")
    return [data[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def opened(files: Sequence[bytes]) -> list[Any]:
    """The images in these files. Raises `OSError` for one that cannot be read."""
    if not files:
        return []
    from PIL import Image  # which a run without images does not need

    return [Image.open(io.BytesIO(file)).copy() for file in files]


def with_images(value: Any, images: Sequence[Any]) -> Any:
    """`value` with the images in their places."""
    if isinstance(value, list):
        return [with_images(item, images) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {PLACE}:
        return images[value[PLACE]]
    return {key: with_images(item, images) for key, item in value.items()}


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    (image if image.mode in AS_PNG else image.convert("RGB")).save(file, format="PNG")
    return file.getvalue()
