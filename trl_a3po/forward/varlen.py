"""Attention over a packed row with the FlashAttention kernels of torch, on CUDA in bfloat16 and float16.

Guarantees: only the pairs that the segments attend to are computed, each once and without a mask in memory. Every
segment attends to itself in one call; continuations of shared prompts attend to those prompts in a second call, and
the two partial results are merged by their log-sum-exps:

    lse = log(exp(lse₁) + exp(lse₂)),   o = exp(lse₁ - lse)·o₁ + exp(lse₂ - lse)·o₂

The backward of each call takes the merged `o` and `lse`, from which the kernel rebuilds the probabilities of the whole
softmax, `exp(q·k - lse)`; so the two calls' gradients simply add up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trl_a3po.forward.layout import PackedRow
from trl_a3po.models.flash_kernels import kernel_refusal


def varlen_refusal(query: torch.Tensor, row: PackedRow, window: int | None) -> str | None:
    """Why the kernels cannot run on `row` with `query`, `(1, H, N, D)`; `None` if they can."""
    refusal = kernel_refusal(query.device, query.dtype, query.shape[-1])
    if refusal is not None:
        return refusal
    if max(segment.length for segment in row.segments) == 1:
        return "sequences of one token"
    if row.shared and window is not None and row.longest > window:
        return f"a shared prompt with a sliding window of {window}, shorter than a sequence of {row.longest} tokens"
    return None


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: PackedRow,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """`(1, H, N, D)` queries, `(1, H_kv, N, D)` keys and values -> `(1, N, H, D)`."""
    if "plan" not in row.cache:
        row.cache["plan"] = VarlenPlan.of(row, query.device)
    plan = row.cache["plan"]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if window is not None and row.longest <= window:
        window = None
    output: torch.Tensor = MergedAttention.apply(q, k, v, plan, scaling, window, FLASH)  # type: ignore[no-untyped-call]  # torch's
    return output[None]


class Spans(NamedTuple):
    """Where consecutive spans begin and the last one ends, `(n + 1,)` int32, and the length of the longest."""

    bounds: torch.Tensor
    longest: int

    @classmethod
    def of(cls, sizes: list[int], device: torch.device) -> "Spans":
        return cls(torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32), max(sizes))


@dataclass(frozen=True, eq=False)
class VarlenPlan:
    """A packed row as the kernels take it.

    Args:
        own: spans of the segments.
        prompts: spans of the shared prompts, which are the first tokens of the row; `None` where no prompt is shared.
        continuing: spans of the continuations of each shared prompt, in the same order.
        prompt_tokens: place of the shared prompts in the row.
        continuing_tokens: place of their continuations in the row.
    """

    own: Spans
    prompts: Spans | None = None
    continuing: Spans | None = None
    prompt_tokens: slice | None = None
    continuing_tokens: slice | None = None

    @classmethod
    def of(cls, row: PackedRow, device: torch.device) -> "VarlenPlan":
        own = Spans.of([segment.length for segment in row.segments], device)
        if not row.shared:
            return cls(own)
        prompts = [row.segments[number].length for number in range(row.shared)]
        continuing = [0] * row.shared
        for segment in row.segments:
            if segment.prefix is not None:
                continuing[segment.prefix] += segment.length
        first = next(segment.start for segment in row.segments if segment.prefix is not None)
        return cls(
            own,
            Spans.of(prompts, device),
            Spans.of(continuing, device),
            slice(0, sum(prompts)),
            slice(first, first + sum(continuing)),
        )


class Kernels(NamedTuple):
    """Attention of spans of queries `(N, H, D)` to spans of keys and values `(K, H_kv, D)`, and its gradient.

    Args:
        forward: `(q, k, v, query_spans, key_spans, causal, scaling, window) -> (o, lse)` with `lse` `(H, N)` float32.
        backward: `(grad_o, q, k, v, o, lse, query_spans, key_spans, causal, scaling, window) -> (dq, dk, dv)`.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class MergedAttention(torch.autograd.Function):
    """Attention over the spans of a `VarlenPlan`: `(N, H, D)` queries, `(N, H_kv, D)` keys, values -> `(N, H, D)`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: VarlenPlan,
        scaling: float,
        window: int | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        o, lse = kernels.forward(q, k, v, plan.own, plan.own, True, scaling, window)
        if plan.prompts is not None:
            prompt, tail = plan.prompt_tokens, plan.continuing_tokens
            to_prompt, lse_prompt = kernels.forward(
                q[tail], k[prompt], v[prompt], plan.continuing, plan.prompts, False, scaling, None
            )
            own = lse[:, tail]
            both = torch.logaddexp(own, lse_prompt)
            share = (lse_prompt - both).exp().T[..., None]
            o[tail] = ((1 - share) * o[tail] + share * to_prompt).to(o.dtype)
            lse[:, tail] = both
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.plan, ctx.scaling, ctx.window, ctx.kernels = plan, scaling, window, kernels
        return o

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        plan, scaling, backward = ctx.plan, ctx.scaling, ctx.kernels.backward
        grad = grad.contiguous()
        dq, dk, dv = backward(grad, q, k, v, o, lse, plan.own, plan.own, True, scaling, ctx.window)
        if plan.prompts is not None:
            prompt, tail = plan.prompt_tokens, plan.continuing_tokens
            dq_tail, dk_prompt, dv_prompt = backward(
                grad[tail],
                q[tail],
                k[prompt],
                v[prompt],
                o[tail],
                lse[:, tail].contiguous(),
                plan.continuing,
                plan.prompts,
                False,
                scaling,
                None,
            )
            dq[tail] += dq_tail
            dk[prompt] += dk_prompt
            dv[prompt] += dv_prompt
        return dq, dk, dv, None, None, None, None


def _flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Spans,
    keys: Spans,
    causal: bool,
    scaling: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        queries.bounds,
        keys.bounds,
        queries.longest,
        keys.longest,
        0.0,
        causal,
        False,
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,  # tokens before the query's own
        window_size_right=0 if causal else -1,
    )
    return o, lse


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    queries: Spans,
    keys: Spans,
    causal: bool,
    scaling: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        o,
        lse,
        queries.bounds,
        keys.bounds,
        queries.longest,
        keys.longest,
        0.0,
        causal,
        torch.zeros(2, dtype=torch.uint64, device=q.device),  # random state of the dropout, which is off
        torch.empty(0, device=q.device),
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if causal else -1,
    )
    return dq, dk, dv


FLASH = Kernels(_flash_forward, _flash_backward)
