"""Whether the trained weights are numbers. Once one is not, no later step makes it one again.

Guarantees: no function here communicates with another process.
"""

import torch
from torch import nn

from trl_a3po.models.sharded import local_part

ADVICE = "with a lower learning_rate, a max_grad_norm, or bf16=True instead of fp16=True"
"""How to resume from a checkpoint before."""


@torch.no_grad()
def not_finite(model: nn.Module) -> str | None:
    """The name of the first trained weight of `model` with a NaN or an infinity; of a weight that is spread over
    processes, in the part of this one."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    return next((name for name, weight in trained if not local_part(weight).isfinite().all()), None)
