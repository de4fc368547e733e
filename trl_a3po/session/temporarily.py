"""`temporarily`: attributes with other values inside a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(obj: object, **values: Any) -> Iterator[None]:
    """Give attributes of `obj` other values inside the block, and their own values again after it, also when the block
    raises."""
    before = {name: getattr(obj, name) for name in values}
    for name, value in values.items():
        setattr(obj, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(obj, name, value)
