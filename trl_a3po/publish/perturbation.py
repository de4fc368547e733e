"""Perturbed weights for the delivery check, and the search for how strong the perturbation must be.

Guarantees: the trained tensors are only read; the global random state does not change; exactly the weights that
training changes are perturbed, each storage once.
"""

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from trl_a3po.models.unwrap import base_model

MIN_MOVEMENT, MAX_MOVEMENT = 1.0, 3.0  # mean |Δ log-prob| that a perturbation should cause
MIN_USEFUL_MOVEMENT = 0.02  # the least that is accepted where no strength causes MIN_MOVEMENT
FIRST_STRENGTH = 0.07

_PATTERN_SIZE = 65_537  # a prime, so that rows of a matrix do not repeat
_HEAD_FACTOR = 3.0  # without it, the layers below would hide the effect of a stale output layer
# A weight of zeros, such as a LoRA B, is moved as if its root mean square were 4.
_ZERO_RMS, _RMS_OF_ZEROS = 1e-3, 4.0


def perturbed_weights(model: PreTrainedModel | PeftModel, strength: float) -> dict[str, torch.Tensor]:
    """New tensors for the parameters that require a gradient: each is moved in fixed random directions by `strength`
    times its root mean square, and further in the output layer. They take as much memory as the gradients."""
    noise = PerturbationNoise(model)
    return {
        name: noise.added_to(weight.detach(), weight, number, strength)
        for number, (name, weight) in enumerate(model.named_parameters())
        if weight.requires_grad
    }


class PerturbationNoise:
    """The fixed random directions in which the parameters of `model` are moved."""

    def __init__(self, model: PreTrainedModel | PeftModel):
        head = base_model(model).get_output_embeddings()
        self._head_weights = set() if head is None else {id(weight) for weight in head.parameters()}
        self._noise = torch.randn(_PATTERN_SIZE, generator=torch.Generator().manual_seed(0))
        self._copies: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def added_to(self, values: torch.Tensor, parameter: nn.Parameter, number: int, strength: float) -> torch.Tensor:
        """A new tensor: `values`, those of the `number`-th `parameter`, moved by `strength`."""
        key = (values.device, values.dtype)
        if key not in self._copies:
            self._copies[key] = self._noise.to(*key)
        factor = _HEAD_FACTOR if id(parameter) in self._head_weights else 1.0
        return _moved(values, strength * factor, self._copies[key].roll(7919 * number))


def _moved(weight: torch.Tensor, strength: float, pattern: torch.Tensor) -> torch.Tensor:
    rms = torch.linalg.vector_norm(weight, dtype=torch.float32) / max(1, weight.numel()) ** 0.5
    noise = pattern * (strength * torch.where(rms < _ZERO_RMS, _RMS_OF_ZEROS, rms)).to(pattern.dtype)
    moved = weight.clone(memory_format=torch.contiguous_format).view(-1)
    whole = len(moved) // len(noise) * len(noise)
    moved[:whole].view(-1, len(noise)).add_(noise)
    moved[whole:].add_(noise[: len(moved) - whole])
    return moved.view(weight.shape)


class StrengthSearch:
    """Searches the strength that moves log-probs by `MIN_MOVEMENT` to `MAX_MOVEMENT`: geometric steps, then bisection
    of the logarithm. `strength` is the next one to try."""

    def __init__(self) -> None:
        self.strength = FIRST_STRENGTH
        self._too_weak, self._too_strong = 0.0, torch.inf
        self._tried: list[tuple[float, float]] = []  # movement, strength

    @staticmethod
    def accepts(movement: float) -> bool:
        return MIN_MOVEMENT <= movement <= MAX_MOVEMENT

    def reject(self, movement: float) -> None:
        """`strength` moved log-probs by `movement`, which is too little, too much or not finite."""
        self._tried.append((movement, self.strength))
        if movement < MIN_MOVEMENT:
            self._too_weak = self.strength
        else:
            self._too_strong = self.strength
        if self._too_weak == 0.0:
            self.strength = self._too_strong / 3
        elif self._too_strong == torch.inf:
            self.strength = 3 * self._too_weak
        else:
            self.strength = (self._too_weak * self._too_strong) ** 0.5

    def weaker_strength(self) -> float | None:
        """The strength to use where none was accepted; `None` if no movement was of use.

        An adapter below an untrained output layer moves log-probs by a tenth at most, which is still far more than the
        gap with fp32. The weakest noise that comes within half of the largest such movement disturbs the forward
        least.
        """
        useful = [(moved, strength) for moved, strength in self._tried if MIN_USEFUL_MOVEMENT <= moved < MIN_MOVEMENT]
        if not useful:
            return None
        largest = max(moved for moved, _ in useful)
        return min(strength for moved, strength in useful if moved >= largest / 2)

    def __str__(self) -> str:
        return ", ".join(f"{movement:.3g} with noise of {strength:.3g}" for movement, strength in self._tried)
