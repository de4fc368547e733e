"""Checks that every engine makes of how it is used: pure functions."""

from trl_a3po.errors import EngineError
from trl_a3po.protocol.weights import WeightUpdate

NOT_STARTED = "The engine was not started: call start(spec, sampling, update) first."


def check_start(update: WeightUpdate, *, used: bool) -> None:
    """Check a call of `start`.

    Args:
        update: the first weights.
        used: the engine was started or closed before.

    Raises:
        EngineError: an engine can be started only once.
        ValueError: `update` is not complete.
    """
    if used:
        raise EngineError("An engine can be started only once: create a new one.")
    if not update.complete:
        raise ValueError("The first update must be complete, because the engine starts without weights.")


def check_version_order(update: WeightUpdate, published: int) -> None:
    """Raise `ValueError` if `update` is older than the version that was published last."""
    if update.version < published:
        raise ValueError(
            f"Version {update.version} cannot be published after version {published}: tokens stamped with the newer "
            "version may be in flight."
        )
