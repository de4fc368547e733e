"""What a run is at while nothing else can be seen: one line, with the seconds it took.

Guarantees: nothing is printed unless `shown`; a line is ended also when what it tells of fails.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told(what: str, shown: bool) -> Iterator[None]:
    """Inside, `what` is happening: printed at the start, and its seconds at the end."""
    if not shown:
        yield
        return
    print(f"trl_a3po: {what} …", end="", flush=True)
    began = time.monotonic()
    done = "failed after"
    try:
        yield
        done = "done in"
    finally:
        print(f" {done} {time.monotonic() - began:.1f} s", flush=True)
