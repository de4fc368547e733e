"""A policy with other weights than its own, without touching them: what the delivery check publishes first.

Guarantees: the trained tensors are only read; neither the global random numbers nor the module's training mode change;
what is perturbed is exactly what training changes, each storage once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.update_parts import Part, whole_update

_PATTERN = 65_537  # a prime, so that rows of a matrix do not repeat
_HEAD = 3.0  # times more for the output layer, or layers before it drown what a stale copy of it would show
_NOTHING, _INSTEAD = 1e-3, 4.0  # a weight of zeros, such as a LoRA B, is moved as if its root mean square were 4


def perturbed_weights(model: nn.Module, strength: float) -> dict[str, torch.Tensor]:
    """New tensors for the parameters that require a gradient, each moved by `strength` times its root mean square in
    fixed random directions, more for the output layer. They take as much memory as the gradients will."""
    pattern = Pattern(model)
    return {
        name: pattern.moved(weight.detach(), weight, number, strength)
        for number, (name, weight) in enumerate(model.named_parameters())
        if weight.requires_grad
    }


class Pattern:
    """The fixed random directions in which the parameters of `model` are moved."""

    def __init__(self, model: nn.Module):
        head = model.get_output_embeddings()
        self._loud = set() if head is None else {id(weight) for weight in head.parameters()}
        self._noise = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0))
        self._copies: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def moved(self, values: torch.Tensor, parameter: nn.Parameter, number: int, strength: float) -> torch.Tensor:
        """A new tensor: `values`, those of the `number`-th `parameter`, moved by `strength`."""
        key = (values.device, values.dtype)
        if key not in self._copies:
            self._copies[key] = self._noise.to(*key)
        louder = strength * _HEAD if id(parameter) in self._loud else strength
        return _moved(values, louder, self._copies[key].roll(7919 * number))


class WholePolicy:
    """A module whose tensors are all in this process, as a delivery check sees it. Its tensors are only read.

    Args:
        model: the trained module, unwrapped.
        parts: module -> what an update of it consists of.
    """

    def __init__(self, model: nn.Module, parts: Callable[[nn.Module], Mapping[str, Part]]):
        self._model = model
        self._parts = parts
        self._weights: dict[str, torch.Tensor] = {}

    def update(self, version: int, *, complete: bool = False) -> WeightUpdate:
        weights = self._weights

        def within(value: Callable[[], torch.Tensor]) -> torch.Tensor:
            return with_weights(self._model, weights, lambda _: value())

        return with_weights(
            self._model,
            weights,
            lambda model: whole_update(self._parts(model), version, complete=complete, within=within),
        )

    def logps(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
    ) -> torch.Tensor:
        return with_weights(
            self._model, self._weights, lambda model: known_logps(model, prompts, completions, temperature)
        )

    @contextmanager
    def perturbed(self, strength: float) -> Iterator[None]:
        """Inside, `update` and `logps` are those of weights moved by `strength`."""
        self._weights = perturbed_weights(self._model, strength)
        try:
            yield
        finally:
            self._weights = {}


def with_weights(model: nn.Module, weights: dict[str, torch.Tensor], function: Callable[[nn.Module], Any]) -> Any:
    """`function(model)` while `model` has `weights` in place of its own parameters of these names."""
    if not weights:
        return function(model)
    given = {f"model.{name}": nn.Parameter(weight) for name, weight in weights.items()}
    return functional_call(_Applied(model, function), given, tie_weights=True)


@torch.no_grad()
def known_logps(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float,
) -> torch.Tensor:
    """`(N, T)` fp32 log-probs of the completions' tokens, on the CPU: the model's plain forward in its own precision,
    without dropout, temperature applied.

    Args:
        prompts: N prompts of one length.
        completions: N completions of T tokens.
    """
    device = model.get_input_embeddings().weight.device
    tokens = torch.tensor(completions, device=device)
    ids = torch.cat([torch.tensor(prompts, device=device), tokens], dim=1)
    with evaluating(model), _head_in_its_own_dtype(model):
        # Not `model(...)`: hooks belong to training.
        logits = model.forward(input_ids=ids, use_cache=False).logits
    length = tokens.shape[1]
    logps = (logits[:, -length - 1 : -1].float() / temperature).log_softmax(-1)
    return logps.gather(2, tokens[:, :, None])[:, :, 0].cpu()


class _Applied(nn.Module):
    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Any]):
        super().__init__()
        self.model = model
        self.function = function

    def forward(self) -> Any:
        return self.function(self.model)


@contextmanager
def _head_in_its_own_dtype(model: nn.Module) -> Iterator[None]:
    """Inside, the output layer takes hidden states of any dtype: of a quantised model, TRL trains a copy of it in
    bfloat16, whatever the rest computes in."""
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(head.weight.dtype), *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def _moved(weight: torch.Tensor, strength: float, pattern: torch.Tensor) -> torch.Tensor:
    rms = torch.linalg.vector_norm(weight, dtype=torch.float32) / max(1, weight.numel()) ** 0.5
    noise = pattern * (strength * torch.where(rms < _NOTHING, _INSTEAD, rms)).to(pattern.dtype)
    moved = weight.clone(memory_format=torch.contiguous_format).view(-1)
    whole = len(moved) // len(noise) * len(noise)
    moved[:whole].view(-1, len(noise)).add_(noise)
    moved[whole:].add_(noise[: len(moved) - whole])
    return moved.view(weight.shape)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, `model` is in eval mode; afterwards each of its modules is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
