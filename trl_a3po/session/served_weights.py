"""Which weights the engine has: those of the policy as it is now, or others that an evaluation has left there.

A callback may put averaged weights in place, evaluate, and put the trained ones back, all at one policy version.

Guarantees: what decides is what the weights are (`publish/fingerprint.py`), not the version under which they were
published.
"""

from collections.abc import Callable

from torch import nn

from trl_a3po.publish.fingerprint import Fingerprint


class ServedWeights:
    """
    Args:
        policy: returns the fingerprint of the policy as it is now.
    """

    def __init__(self, policy: Callable[[], Fingerprint]):
        self._policy = policy
        self._served: Fingerprint | None = None
        self._evaluated: list[Fingerprint] = []
        self._since: float | None = None

    def published(self, began: float, *, for_evaluation: bool) -> None:
        """Note that the engine has the weights of the policy now, from a publish that began at `began`, on the
        clock of the queue."""
        self._served = self._policy()
        if for_evaluation:
            self._evaluated.append(self._served)
            self._since = began if self._since is None else self._since

    @property
    def differ(self) -> bool:
        """Whether the policy is no longer what was published."""
        return self._served is None or bool(self._policy().changed(self._served))

    def end_evaluations(self) -> float | None:
        """The time since which evaluations sampled from other weights than those of the policy now; `None` if they all
        sampled from these."""
        evaluated, since = self._evaluated, self._since
        self._evaluated, self._since = [], None
        if not evaluated:
            return None
        now = self._policy()
        return since if any(before.values != now.values for before in evaluated) else None


def check_same_model(started_with: nn.Module, now: nn.Module) -> None:
    """Raise `ValueError` if another model has taken the place of the one that the engine was built from."""
    if now is not started_with:
        raise ValueError(
            "trainer.model was replaced during training, but the engine samples from the model that training began "
            "with: load the weights to evaluate into trainer.model, and load the trained ones again afterwards."
        )
