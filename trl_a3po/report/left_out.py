"""How many rows a run left out, from its timeline."""

from collections import Counter
from typing import Any


def rows_left_out(lines: list[dict[str, Any]]) -> Counter[str]:
    """Reason -> rows. A run that is resumed reads rows that its queue had not used again: they count once.

    Args:
        lines: as `read_timeline` returns them.
    """
    return Counter({line["row"]: str(line["reason"]) for line in lines if line["kind"] == "left_out"}.values())
