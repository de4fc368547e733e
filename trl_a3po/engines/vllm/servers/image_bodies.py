"""The body of a request with images, as the extension `a3po_images.py` of a server reads it: no I/O."""

import json
from typing import Any

from trl_a3po.engines.vllm.servers.extension.a3po_images import FIELD, MOST_BYTES, SIZES, TYPE
from trl_a3po.protocol.images import PromptImages

_MOST_TOKENS = 1 << 24  # bytes of a request that are no arrays


def with_images(body: dict[str, Any], images: PromptImages) -> tuple[str, list[bytes]]:
    """The request `body` with `images`: its content type, and its bytes in parts."""
    import torch
    from safetensors.torch import save

    tensors = {FIELD + name: field.detach().cpu().contiguous() for name, field in images.fields.items()}
    tensors[SIZES] = torch.tensor([image.size for image in images.images])
    text = json.dumps(body).encode()
    return f"{TYPE}; json={len(text)}", [text, save(tensors)]


def too_large(images: PromptImages) -> str | None:
    """Why these images cannot be sent; `None` if they can."""
    size = sum(field.nbytes for field in images.fields.values())
    if size <= MOST_BYTES - _MOST_TOKENS:
        return None
    return (
        f"The images of a prompt are {size / 2**20:.0f} MiB as the processor makes them, and a vLLM server takes up "
        f"to {(MOST_BYTES - _MOST_TOKENS) / 2**20:.0f} MiB: show fewer or smaller images."
    )
