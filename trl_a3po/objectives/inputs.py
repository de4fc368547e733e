"""What every objective does with its inputs before any maths: check them, upcast them, blank what the mask hides.

Guarantees: after `blank`, nothing that stood outside the mask can reach a value or a gradient.
"""

from functools import reduce

import torch


def check_option(name: str, value: str, options: tuple[str, ...]) -> None:
    """Raises `ValueError` when `value` is none of `options`."""
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown: set one of {', '.join(map(repr, options))}.")


def check_shapes(mask: torch.Tensor, advantages: torch.Tensor | None = None, **logps: torch.Tensor) -> None:
    """Raises `ValueError` unless every tensor of `logps` has the mask's shape `(B, T)` and `advantages` has `(B,)`."""
    for name, tensor in logps.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but mask has {tuple(mask.shape)}: pass both aligned with the "
                "completion tokens, (B, T)."
            )
    if advantages is not None and advantages.shape != mask.shape[:1]:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)} but mask has {tuple(mask.shape)}: pass one advantage per "
            "row, (B,)."
        )


def upcast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in one dtype: float64 if any of them is, else float32."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return tuple(tensor.to(dtype) for tensor in tensors)


def blank(mask: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with 0 outside the boolean mask. Comes before any `exp`: `0 * inf` and its gradient are NaN."""
    return tuple(torch.where(mask, tensor, 0) for tensor in tensors)


def staleness_inside(mask: torch.Tensor, staleness: torch.Tensor) -> torch.Tensor:
    """`staleness` with 0 outside the boolean mask. Raises `ValueError` when it is negative inside."""
    (inside,) = blank(mask, staleness)
    youngest = int(inside.min())
    if youngest < 0:
        raise ValueError(
            f"staleness holds {youngest} inside the mask, but no token can be newer than the policy: compute it with "
            "token_staleness, from versions aligned with the completion tokens."
        )
    return inside


def row_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`(B, T)` blanked values -> `(B, 1)`, their mean over the row's tokens; 0 for a row without tokens."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
