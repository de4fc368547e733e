"""`StepNormalizer`: for loss types that divide by the tokens of an optimizer step, before their number is known.

Guarantees: after the last micro-step of a period, the gradients and the logged loss are the same as if the loss of
every micro-batch had been divided by the number of tokens of the period from the beginning, whichever groups came
first.
"""

from collections.abc import Iterable

import torch

STEP_NORMALIZED_LOSS_TYPES = ("dapo", "cispo", "vespo")  # divided by the tokens of the whole optimizer step


class StepNormalizer:
    """Divides the loss of each micro-batch by a guess of the period's number of tokens, and corrects the guess at the
    end of the period, by one factor on the gradients, which are linear in the loss.

    The number is not known before, because Periodic Asynchrony (arXiv 2511.18871) begins to train before the last
    tokens of a period are sampled.

    Args:
        micro_steps: micro-steps per period.
    """

    def __init__(self, micro_steps: int):
        self._micro_steps = micro_steps
        self._guess = self._tokens = torch.tensor(1)
        self._loss = torch.tensor(0.0)

    def guess(self, number: int, tokens: torch.Tensor) -> torch.Tensor:
        """The number to divide the loss of a micro-step by. It is the same in every micro-step of a period, and close
        to the period's number of tokens.

        Args:
            number: number of the micro-step in its period, 0-based.
            tokens: completion tokens of the micro-step in all processes, 0-dim.
        """
        if number == 0:
            self._guess, self._tokens = tokens.clamp(min=1) * self._micro_steps, torch.zeros_like(tokens)
            self._loss = torch.tensor(0.0)
        self._tokens = self._tokens + tokens
        return self._guess

    def correct(self, number: int, loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        """Call it after the backward pass of micro-step `number`. Returns the loss to log for this micro-step.

        After the last micro-step of a period, it scales the gradients of `parameters`, and the losses that it has
        returned for the period add up to the period's loss.
        """
        self._loss = self._loss.to(loss) + loss
        if number + 1 < self._micro_steps:
            return loss
        factor = self._guess.item() / max(self._tokens.item(), 1)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return loss + (factor - 1) * self._loss
