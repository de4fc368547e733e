"""Whether the length of completions explains how long their groups were in the engine.

Guarantees: pure; says `None` where the lines cannot tell.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

FEWEST_GROUPS = 8
MOST_GROUPS = 300  # that are compared with each other
UNEXPLAINED = 2.0  # times as long a token takes in a straggler as usually, from which length does not explain it


def share_of_length(groups: list[dict[str, Any]]) -> float | None:
    """The share of the time of sampling that goes with the length of completions, from 0 to 1: 1 if a group twice as
    long takes twice as long, 0 if all take as long as each other.

    It is the larger one of two shares: that of the time of each group with its longest completion, for an engine that
    samples groups side by side, and that of the time since the group before was finished with the tokens of the group,
    for an engine that samples one group after the other. `None` for few groups, or for groups of one length.
    """
    groups = [g for g in groups if g.get("lengths") and g["submitted"] is not None and g["finished"] is not None]
    groups = groups[:: -(-len(groups) // MOST_GROUPS) or 1]
    if len(groups) < FEWEST_GROUPS:
        return None
    groups = sorted(groups, key=lambda group: float(group["finished"]))
    submitted, finished = (np.array([group[name] for group in groups]) for name in ("submitted", "finished"))
    longest, tokens = (np.array([of(group["lengths"]) for group in groups], dtype=float) for of in (max, sum))
    alone = finished[1:] - np.maximum(finished[:-1], submitted[1:])
    shares = [_share(longest, finished - submitted), _share(tokens[1:], alone)]
    known = [share for share in shares if share is not None]
    return max(known) if known else None


def stragglers_are_long(stragglers: list[tuple[float, float]]) -> bool | None:
    """Whether long completions explain stragglers.

    Args:
        stragglers: how many times the usual time each took, and how many times the usual length its longest completion
            has.
    """
    if not stragglers:
        return None
    return bool(np.median([time / length for time, length in stragglers]) < UNEXPLAINED)


def _share(x: Array, y: Array) -> float | None:
    """The share of the mean of `y` that rises with `x`, by the median of the slopes between two values (Theil and
    Sen), so that a few stragglers do not decide it."""
    first, second = np.triu_indices(len(x), 1)
    apart = x[first] != x[second]
    if not apart.any() or not y.mean() > 0:
        return None
    slopes = (y[first] - y[second])[apart] / (x[first] - x[second])[apart]
    return float(np.clip(np.median(slopes) * x.mean() / y.mean(), 0.0, 1.0))
