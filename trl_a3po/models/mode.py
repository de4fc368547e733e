"""The training mode of a model, kept from threads that do not train it.

Guarantees: inside `mode_of_this_thread`, `train()` and `eval()` act for the thread that entered it and have no effect
for any other; afterwards the model has its own methods again.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

logger = logging.getLogger(__name__)


@contextmanager
def mode_of_this_thread(model: nn.Module) -> Iterator[None]:
    """Inside, only this thread changes whether `model` is in training mode.

    A reward function runs beside training. If it called `model.eval()` on the policy that is being trained, as it may
    where everything runs in turn, training would go on without dropout and be logged as an evaluation.
    """
    owner, said = threading.get_ident(), threading.Event()

    def train(mode: bool = True) -> nn.Module:
        if threading.get_ident() == owner:
            return type(model).train(model, mode)
        if not said.is_set():
            said.set()
            logger.warning(
                "%s() of the policy was called in the thread %r, beside training, and has no effect there: the mode "
                "of the policy belongs to training. A reward function that needs another mode can load a model of "
                "its own.",
                "train" if mode else "eval",
                threading.current_thread().name,
            )
        return model

    model.train = train  # type: ignore[method-assign]  # deleted below, which uncovers the method of the class
    try:
        yield
    finally:
        del model.train
