"""One line on standard output for a step of a run that shows nothing else, with the seconds it took.

Guarantees: nothing is printed unless `shown`; the line is also completed when the step fails.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
