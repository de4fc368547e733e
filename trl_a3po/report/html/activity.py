"""How much of what happened at the same time in a run, in bins of time.

Guarantees: pure; the means over the bins are exact, however many spans there are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trl_a3po.report.html.reported_run import PHASES, Lines

Array = np.ndarray[Any, np.dtype[Any]]

MOST_BINS = 240
ACTIVITIES = {  # of the trainer -> kind of line
    "publishing": "publish",
    "waiting": "take",
    "evaluation": "evaluation",
    "engine start": "engine_start",
}


def time_edges(lines: Lines) -> Array:
    """The edges of the bins, in seconds since 1970, from the first to the last thing that happened."""
    times = [line[name] for line in lines for name in ("began", "ended", "submitted") if line.get(name)]
    if not times or max(times) <= min(times):
        return np.zeros(0)
    return np.linspace(min(times), max(times), MOST_BINS + 1)


def mean_number(spans: Sequence[tuple[float, float]], edges: Array) -> Array:
    """For each bin, how many of `spans` cover a moment of it, in the mean."""
    begins, ends = np.sort(np.array(spans, dtype=float).reshape(-1, 2), axis=0).T
    return np.diff(_seconds_since(begins, edges) - _seconds_since(ends, edges)) / np.diff(edges)


def groups_by_phase(lines: Lines, edges: Array) -> dict[str, Array]:
    """Phase of a group -> for each bin, how many groups are in it."""
    groups = [line for line in lines if line["kind"] == "group"]
    return {
        phase: mean_number([(g[since], g[until]) for g in groups if g[since] and g[until]], edges)
        for phase, (since, until) in PHASES.items()
    }


def trainer_by_activity(lines: Lines, edges: Array) -> dict[str, Array]:
    """What the trainer does -> for each bin, the share of its time. The rest is the time outside of steps."""
    shares = {
        name: mean_number([(line["began"], line["ended"]) for line in lines if line["kind"] == kind], edges)
        for name, kind in ACTIVITIES.items()
    }
    steps = mean_number([(line["began"], line["ended"]) for line in lines if line["kind"] == "step"], edges)
    inside = shares["publishing"] + shares["waiting"] + shares["engine start"]
    return {
        "training": np.clip(steps - inside, 0, 1),
        **{name: np.clip(share, 0, 1) for name, share in shares.items()},
    }


def seconds_by_phase(lines: Lines) -> dict[str, list[float]]:
    """Phase of a group -> how long each group was in it."""
    groups = [line for line in lines if line["kind"] == "group"]
    return {
        phase: [g[until] - g[since] for g in groups if g[since] and g[until]]
        for phase, (since, until) in PHASES.items()
    }


def _seconds_since(times: Array, moments: Array) -> Array:
    """For each moment, the sum of the seconds since those of the sorted `times` that are before it."""
    before = np.searchsorted(times, moments)
    sums = np.concatenate([[0.0], np.cumsum(times - moments[0])])
    seconds: Array = before * (moments - moments[0]) - sums[before]
    return seconds
