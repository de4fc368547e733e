"""Errors of writing: what the system or a serializer raises becomes a `CheckpointError`, which says what failed."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from trl_a3po.errors import A3POError, CheckpointError

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, TypeError)  # of json, torch.save and safetensors


@contextmanager
def as_checkpoint_error(
    failure: str, advice: str = "free space, or make that folder writable, and try again."
) -> Iterator[None]:
    """Around code that writes or deletes files.

    Args:
        failure: what has failed if it raises (for example, "Saving the model failed in /runs/1").
        advice: what to do then.

    Raises:
        CheckpointError: something could not be written or deleted.
    """
    try:
        yield
    except A3POError:
        raise
    except WRITE_ERRORS as error:
        raise CheckpointError(f"{failure} ({type(error).__name__}: {error}): {advice}") from error
