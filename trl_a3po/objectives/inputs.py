"""What every objective does with its inputs before any maths: check them, upcast them, blank what the mask hides.

Guarantees: after `blank`, nothing that stood outside the mask can reach a value or a gradient.
"""

from functools import reduce

import torch


def check_option(name: str, value: str, options: tuple[str, ...]) -> None:
    """Raises `ValueError` when `value` is not one of `options`."""
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown: set one of {', '.join(map(repr, options))}.")


def check_shapes(mask: torch.Tensor, advantages: torch.Tensor | None = None, **logps: torch.Tensor) -> None:
    """Raises `ValueError` unless every tensor of `logps` has the mask's shape `(B, T)` and `advantages` has `(B,)`,
    `(B, 1)` or `(B, T)`."""
    for name, tensor in logps.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but mask has {tuple(mask.shape)}: pass both aligned with the "
                "completion tokens, (B, T)."
            )
    rows = mask.shape[:1]
    if advantages is not None and advantages.shape not in (rows, (*rows, 1), mask.shape):
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)} but mask has {tuple(mask.shape)}: pass one advantage per "
            "row, (B,), or one per token, (B, T)."
        )


def per_token(advantages: torch.Tensor) -> torch.Tensor:
    """Advantages `(B,)`, `(B, 1)` or `(B, T)` in a shape that broadcasts over tokens, as TRL's loss takes them."""
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


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


def checked_inputs(
    policy_logps: torch.Tensor,
    behavior_logps: torch.Tensor,
    staleness: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The boolean mask, and `lt`, `lb` and `d` with 0 outside of the mask.

    Raises:
        ValueError: shapes that do not match, a negative staleness.
    """
    check_shapes(mask, advantages, policy_logps=policy_logps, behavior_logps=behavior_logps, staleness=staleness)
    mask = mask.bool()
    lt, lb = blank(mask, *upcast(policy_logps, behavior_logps))
    return mask, lt, lb, staleness_inside(mask, staleness)


def recomputed_inside(mask: torch.Tensor, recomputed_logps: torch.Tensor | None, lt: torch.Tensor) -> torch.Tensor:
    """The log-probs of a forward pass at the take, with 0 outside of the mask; `lt` if there was none.

    Raises:
        ValueError: they have another shape than the mask.
    """
    if recomputed_logps is None:
        return lt
    check_shapes(mask, recomputed_logps=recomputed_logps)
    (lp,) = blank(mask, recomputed_logps.to(lt.dtype))
    return lp


def anchor_outside(mask: torch.Tensor, anchor: torch.Tensor, policy_logps: torch.Tensor) -> torch.Tensor:
    """`anchor` inside the mask; outside, the current log-prob or, where that is not finite, 0."""
    outside = policy_logps.detach().to(anchor.dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return torch.where(mask, anchor, outside)
