"""The hook that gradient checkpointing has on the input embeddings of a model.

Guarantees: it is there once, also where checkpointing is turned off and on again for each batch, as TRL does:
transformers adds a hook each time, and each forward pass would call one for every batch so far.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from trl_a3po.models.unwrap import base_model

HOOKS = "_require_grads_hooks"  # where transformers keeps those that it has added last


@contextmanager
def one_input_hook(model: nn.Module) -> Iterator[None]:
    """Inside, gradient checkpointing may be turned off and on again. Afterwards the hooks of before are gone, if there
    are new ones."""
    inner = base_model(model)
    before = vars(inner).get(HOOKS, [])
    try:
        yield
    finally:
        if vars(inner).get(HOOKS, []) is not before:
            for hook in before:
                hook.remove()
