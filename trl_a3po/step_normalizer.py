"""`StepNormalizer`: for loss types that divide by the tokens of an optimizer step, before these are known.

Guarantees: after the last micro-step of a period, gradients and logged loss are those of dividing every micro-batch's
sum by the period's tokens from the beginning, whichever groups came first.
"""

from collections.abc import Iterable

import torch

STEP_NORMALIZED_LOSS_TYPES = ("dapo", "cispo", "vespo")  # divided by the tokens of the whole optimizer step


class StepNormalizer:
    """Divides each micro-batch's loss by a guess of the period's tokens, and corrects for it once, by one factor on
    the gradients, which are linear in the loss. Periodic Asynchrony (arXiv 2511.18871) begins to train before the
    last tokens of a period are sampled.

    Args:
        micro_steps: micro-steps of a period.
    """

    def __init__(self, micro_steps: int):
        self._micro_steps = micro_steps
        self._guess = self._tokens = torch.tensor(1)
        self._loss = torch.tensor(0.0)

    def guess(self, number: int, tokens: torch.Tensor) -> torch.Tensor:
        """What to divide by in micro-step `number` (from 0), whose completions have `tokens` (0-dim, all processes)
        tokens: the same in every micro-step of a period, and near to its tokens."""
        if number == 0:
            self._guess, self._tokens = tokens.clamp(min=1) * self._micro_steps, torch.zeros_like(tokens)
            self._loss = torch.tensor(0.0)
        self._tokens = self._tokens + tokens
        return self._guess

    def correct(self, number: int, loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        """After the backward of micro-step `number`: the loss to log for it; after the period's last one, the
        gradients of `parameters` are scaled, and the losses logged for the period add up to its own."""
        self._loss = self._loss.to(loss) + loss
        if number + 1 < self._micro_steps:
            return loss
        factor = self._guess.item() / max(self._tokens.item(), 1)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return loss + (factor - 1) * self._loss
