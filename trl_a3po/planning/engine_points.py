"""How fast the engine of a finished run was, from when its groups were submitted and finished.

Guarantees: pure. A slot is given in the order of submission, as in a simulation, so the time that a completion waits
for its slot is not taken for decoding.
"""

import heapq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trl_a3po.planning.simulation import Split

Lines = list[dict[str, Any]]
Array = np.ndarray[Any, np.dtype[np.float64]]
ROUNDING = 1e-6  # seconds
TURNS = 6
LEAST_SPREAD = 0.02  # of the number of sequences, as a share of its mean, for their slope to count
CONTINUED = 4  # times the slots of the run, up to which the line through its decode steps is continued
FEWEST_GROUPS = 8  # submitted after the first take; with fewer, those before it count too


def engine_points(groups: Lines, split: Split, num_generations: int, since: float) -> list[tuple[float, float]]:
    """Sequences of one engine, and its tokens per second with so many.

    A group takes as many decode steps as its longest completion has tokens, once that has a slot, which gives the time
    of a step for the number of sequences that were decoded at that time. How the steps of a group are spread over its
    time follows from the line through the times of all steps, and the line from them: the two are found in turns.

    Args:
        groups: lines of groups that were submitted. Those that were never finished are taken to have been decoded
            until the attempt ended.
        since: a group that was submitted before does not count, because the engine was starting.
    """
    groups = sorted(groups, key=lambda group: float(group["submitted"]))
    finished = np.array([group["finished"] is not None for group in groups])
    late = finished & np.array([group["submitted"] >= since for group in groups])
    counted = late if late.sum() >= FEWEST_GROUPS else finished
    until = np.array([group["finished"] or group["ended"] for group in groups])
    lengths = [np.array(group["lengths"] or [1] * num_generations, dtype=float) for group in groups]
    longest = np.array([each.max() for each in lengths])[counted]
    times = np.array([groups[0]["submitted"], until.max()])
    decoded = [
        Decoded(group["submitted"], *rest) for group, *rest in zip(groups, until, lengths, finished, strict=True)
    ]
    steps = times - times[0]  # decode steps until each of the times, up to a factor
    slots = float(split.slots)
    line = Line(1.0, 0.0, 1.0, 0.0)
    for _ in range(TURNS):
        begins, ends, seconds = _decoded(decoded, int(slots) * split.engines, times, steps)
        times, decoding = _decoding(begins, ends)
        decoding = np.minimum(decoding, slots * split.engines)
        passed = np.diff(times) * (decoding > 0)
        steps = _sums(passed / line.seconds(np.maximum(decoding, 1.0) / split.engines))
        beside = _sums(decoding * np.diff(steps))
        spans = np.array([(min(first), max(last)) for first, last in zip(begins, ends, strict=True)])
        of_groups = [np.diff(np.interp(spans, times, each))[:, 0] for each in (beside, steps)]
        sequences = of_groups[0] / of_groups[1] / split.engines
        line = _line(sequences[counted], seconds[counted], longest)
    numbers = [1.0, CONTINUED * slots] if line.spread > LEAST_SPREAD * line.middle else [line.middle]
    return [(number, number / float(line.seconds(number))) for number in numbers]


class Decoded(NamedTuple):
    """When a group was submitted, until when it was decoded, its lengths, and whether it was finished then."""

    submitted: float
    until: float
    lengths: Array
    finished: bool


@dataclass(frozen=True)
class Line:
    """The time of a decode step, `base + slope * sequences`, from measurements with `middle` sequences on average,
    and this standard deviation."""

    base: float
    slope: float
    middle: float
    spread: float

    def seconds(self, sequences: Any) -> Any:
        return self.base + self.slope * sequences


def _decoded(
    groups: list[Decoded], slots: int, times: Array, steps: Array
) -> tuple[list[list[float]], list[list[float]], Array]:
    """When each sequence of each group got its slot and ended, and the mean seconds of a decode step of each group.

    Args:
        times, steps: decode steps until each of the times. Those of a group are scaled so that the last of its
            sequences ends when the group does.
    """
    free = [float("-inf")] * slots  # when each slot is free, a heap
    begins, ends, seconds = [], [], []
    for submitted, until, lengths, finished in groups:
        first = [max(submitted, heapq.heappop(free)) for _ in lengths[:slots]]
        first += [first[-1]] * (len(lengths) - len(first))
        first = [min(begin, until - ROUNDING) for begin in first]
        at = np.interp([*first, until], times, steps)
        room = (at[-1] - at[:-1]) / lengths
        last = np.minimum(np.interp(at[:-1] + room.min() * lengths, steps, times), until)
        if not finished:
            last = np.full_like(lengths, until)
        for end in last[:slots]:
            heapq.heappush(free, float(end))
        begins.append(first)
        ends.append(last.tolist())
        decisive = int(room.argmin())
        seconds.append((until - first[decisive]) / lengths[decisive])
    return begins, ends, np.array(seconds)


def _decoding(begins: list[list[float]], ends: list[list[float]]) -> tuple[Array, Array]:
    """Times, and the number of sequences with a slot between each two of them."""
    starts, stops = np.concatenate(begins), np.concatenate(ends)
    times = np.concatenate([starts, stops])
    order = np.argsort(times, kind="stable")
    changes = np.repeat([1, -1], len(starts))[order]
    return times[order], np.cumsum(changes)[:-1].astype(float)


def _sums(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])


def _line(sequences: Array, seconds: Array, weights: Array) -> Line:
    """The line through the times of a decode step, with neither number below 0."""
    middle, mean = np.average(sequences, weights=weights), np.average(seconds, weights=weights)
    variance = np.average((sequences - middle) ** 2, weights=weights)
    together = np.average((sequences - middle) * (seconds - mean), weights=weights)
    slope = float(np.clip(together / variance if variance else 0.0, 0.0, mean / middle))
    return Line(float(mean - slope * middle), slope, float(middle), float(np.sqrt(variance)))
