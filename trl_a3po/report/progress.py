"""What a person sees of the time that the start of a run takes: a line for each of its steps, and nothing of it in the
progress bar's estimate.

Guarantees: nothing is printed unless `shown`; the line is also completed when the step fails.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from transformers import ProgressCallback, TrainerCallback


@contextmanager
def progress_line(what: str, shown: bool) -> Iterator[None]:
    """Print `what` at the start of the context, and the seconds it took at the end."""
    if not shown:
        yield
        return
    print(f"trl_a3po: {what} …", end="", flush=True)
    began = time.monotonic()
    outcome = "failed after"
    try:
        yield
        outcome = "done in"
    finally:
        print(f" {outcome} {time.monotonic() - began:.1f} s", flush=True)


def restart_clocks(callbacks: Iterable[TrainerCallback]) -> None:
    """Leave the time since the progress bars among `callbacks` were drawn out of what they estimate from."""
    for callback in callbacks:
        if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
            callback.training_bar.unpause()
