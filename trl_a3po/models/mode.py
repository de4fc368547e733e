"""The training mode of a model, kept from threads that do not train it.

Guarantees: inside `mode_of_this_thread`, `train()` and `eval()` of the model act for the thread that entered it and
have no effect for any other; a copy of the model has a mode of its own; afterwards the model has its own methods
again.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


@contextmanager
def mode_of_this_thread(model: nn.Module) -> Iterator[None]:
    """Inside, only this thread changes whether `model` is in training mode.

    A reward function runs beside training. If it called `model.eval()` on the policy that is being trained, as it may
    where everything runs in turn, training would go on without dropout and be logged as an evaluation.
    """
    before = vars(model).get("train")
    object.__setattr__(model, "train", _GuardedTrain(model, model.train))
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(model, "train")
        else:
            object.__setattr__(model, "train", before)


class _GuardedTrain:
    """Stands for `model.train`, which `model.eval` calls too. A copy of the model gets the method of its class."""

    def __init__(self, model: nn.Module, train: Callable[[bool], nn.Module]):
        self._model = model
        self._train = train
        self._owner = threading.get_ident()
        self._reported = False

    def __call__(self, mode: bool = True) -> nn.Module:
        if threading.get_ident() == self._owner:
            return self._train(mode)
        if not self._reported:
            self._reported = True
            logger.warning(
                "%s() of the policy was called in the thread %r, beside training, and has no effect there: the mode "
                "of the policy belongs to training. A reward function that needs another mode can load a model of "
                "its own.",
                "train" if mode else "eval",
                threading.current_thread().name,
            )
        return self._model

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., nn.Module]:
        return partial(type(self._model).train, memo[id(self._model)])

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self._model).train, self._model)
