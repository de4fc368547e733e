"""Where the FlashAttention kernels that come with torch can run."""

import torch

HALF = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


def kernel_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot run with this device, dtype and head dimension; `None` if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "no CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "a CUDA device older than Ampere"
    if dtype not in HALF:
        return f"dtype {dtype}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"head dimension {head_dim}"
    return None
