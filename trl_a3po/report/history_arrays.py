"""Values of a run's log history as arrays that a panel can draw.

Guarantees: a panel gets the entries that hold all values it needs, and the keys that were never logged.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

History = list[dict[str, Any]]
Array = np.ndarray[Any, np.dtype[Any]]

MAX_BARS = 60
SMOOTHING_STEPS = 9
FRACTIONS = "a3po/dN/fraction"
TIMES = ("step_time", "a3po/time/wait")


def entries_with(history: History, keys: tuple[str, ...]) -> tuple[History, list[str]]:
    """The entries that hold values for all `keys`, and the keys for which no entry holds a value.

    The time waited is logged only where a batch is taken, so entries without it are kept.
    """
    absent = [key for key in keys if not any(_holds(entry, key) for entry in history)]
    decisive = [key for key in keys if key != "a3po/time/wait"]
    entries = [entry for entry in history if "step" in entry and all(_holds(entry, key) for key in decisive)]
    return entries, absent or ([] if entries else list(keys))


def series(entries: History, key: str, missing: float = np.nan) -> Array:
    """`(entries,)` values of one key; `missing` where an entry has none."""
    values = [entry.get(key) for entry in entries]
    return np.array([missing if value is None else value for value in values], dtype=float)


def staleness_values(entries: History) -> list[int]:
    """Every staleness that a token had, in ascending order."""
    keys = {key for entry in entries for key in entry if key.startswith("a3po/d") and key.endswith("/fraction")}
    return sorted(int(key.split("/")[1][1:]) for key in keys)


def time_split(entries: History) -> tuple[Array, Array, Array]:
    """Seconds of waiting, publishing and training in the mean optimizer step of each entry, shapes `(entries,)`."""
    wait, publish = series(entries, "a3po/time/wait", 0.0), series(entries, "a3po/time/publish", 0.0)
    return wait, publish, np.maximum(series(entries, "step_time") - wait - publish, 0.0)


def waiting_share(log_history: History) -> float:
    """Share of the time of all steps in which the trainer waited for rollouts; NaN where no time was logged."""
    entries, absent = entries_with(log_history, TIMES)
    if absent:
        return float("nan")
    wait, publish, train = (seconds * steps_covered(entries) for seconds in time_split(entries))
    return float(wait.sum() / max((wait + publish + train).sum(), 1e-9))


def steps_covered(entries: History) -> Array:
    """Over how many optimizer steps each entry is a mean."""
    steps = series(entries, "step")
    first = min(steps[0], steps[1] - steps[0]) if len(steps) > 1 else steps[0]
    return np.maximum(np.diff(steps, prepend=steps[0] - first), 1.0)


def spacing(entries: History) -> float:
    """Optimizer steps between two entries."""
    return float(np.median(np.diff(series(entries, "step")))) if len(entries) > 1 else 1.0


def bars_of(entries: History) -> list[Array]:
    """Numbers of the neighbouring entries that share a bar, equally many in all bars but the last."""
    size = -(-len(entries) // MAX_BARS)
    return [np.arange(at, min(at + size, len(entries))) for at in range(0, len(entries), size)]


def bar_means(bars: list[Array], values: Array) -> Array:
    """The mean over the entries of each bar."""
    return np.array([values[inside].mean() for inside in bars])


def bar_extents(entries: History, bars: list[Array]) -> tuple[Array, Array]:
    """Left edge and width of each bar."""
    steps, width = series(entries, "step"), spacing(entries)
    left = np.array([steps[inside[0]] for inside in bars]) - width / 2
    return left, np.array([steps[inside[-1]] - steps[inside[0]] for inside in bars]) + width


def step_limits(histories: Collection[History]) -> tuple[float, float]:
    """The range of steps that every panel shows."""
    first = min(entries[0]["step"] for entries in histories)
    last = max(entries[-1]["step"] for entries in histories)
    margin = max(0.7 * max(spacing(entries) for entries in histories), 0.012 * (last - first))
    return first - margin, last + margin


def running_mean(values: Array) -> Array:
    """Centred running mean, whose window shrinks at both ends."""
    half = min(max(SMOOTHING_STEPS, len(values) // 30), len(values)) // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _holds(entry: dict[str, Any], key: str) -> bool:
    if key == FRACTIONS:
        return bool(staleness_values([entry]))
    return entry.get(key) is not None and bool(np.isfinite(entry[key]))
