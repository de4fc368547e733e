"""What a finished run did, from its timeline: its rules, lengths, rewards and rates, for the forecast of another run.

Guarantees: only what happened after the first take and before the end of the last optimizer step counts; evaluations
and saving count as nothing, so a forecast leaves them out.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from trl_a3po.planning.rates import EngineSpeed, Rates
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulation import Split
from trl_a3po.planning.workload import Measured, Workload

Lines = list[dict[str, Any]]
Array = np.ndarray[Any, np.dtype[np.float64]]

FEWEST_STEPS = 3
LEAST_DIFFERENCE = 0.01  # in the tokens of two takes, as a share of the mean, for their slope to count
LEAST_SHARE = 0.1  # of the time of training that is taken to follow the number of tokens


@dataclass(frozen=True)
class FinishedRun:
    """
    Args:
        work, rates, split, rules: as `simulate` takes them.
        step_seconds: measured time of an optimizer step.
        waiting: share of that time in which the trainer waited for groups.
    """

    work: Workload
    rates: Rates
    split: Split
    rules: Rules
    step_seconds: float
    waiting: float


def finished_run(lines: Lines) -> FinishedRun:
    """Read a run from the lines that `read_timeline` returns.

    Raises:
        ValueError: the run is too short, or an earlier version wrote its timeline.
    """
    starts = [number for number, line in enumerate(lines) if line["kind"] == "start"]
    if not starts:
        raise ValueError("The timeline has no first line: give the output_dir of a run.")
    start, lines = lines[starts[-1]], lines[starts[-1] + 1 :]
    rules, split = Rules.of_start(start), Split(**start["devices"])
    kinds: dict[str, Lines] = defaultdict(list)
    for line in lines:
        kinds[line["kind"]].append(line)
    measured = _measured_steps(kinds)
    since, until = measured[0]["began"], measured[-1]["ended"]
    seconds = _seconds(measured, since, until) - _seconds(kinds["evaluation"], since, until)
    sampled = [group for group in kinds["group"] if group["submitted"] is not None and group["finished"] is not None]
    return FinishedRun(
        work=Workload(Measured([group["lengths"] for group in sampled]), Measured(_scoring(kinds["group"]))),
        rates=Rates(EngineSpeed(_engine_points(sampled, split)), *_trainer_rates(kinds, rules, split, since, until)),
        split=split,
        rules=rules,
        step_seconds=seconds / len(measured),
        waiting=_seconds(kinds["take"], since, until) / seconds,
    )


def _measured_steps(kinds: dict[str, Lines]) -> Lines:
    """The optimizer steps after the first take: the step before them starts the engine."""
    takes = kinds["take"]
    steps = [step for step in kinds["step"] if len(takes) > 1 and step["began"] >= takes[0]["ended"]]
    if len(steps) < FEWEST_STEPS:
        raise ValueError(
            f"The run has {len(steps)} optimizer steps after its first take, which is too few for its rates: give one "
            f"with at least {FEWEST_STEPS}."
        )
    return steps


def _scoring(groups: Lines) -> list[list[float]]:
    """Seconds of the rewards of each group."""
    return [[group["scored"] - group["scoring"]] for group in groups if group["scored"] and group["scoring"]]


def _trainer_rates(
    kinds: dict[str, Lines], rules: Rules, split: Split, since: float, until: float
) -> tuple[float, float, float]:
    """The rates of training, as `Rates` has them behind the engine's."""
    per_token, besides = _training_seconds(kinds, since, until)
    publishes = [line["ended"] - line["began"] for line in kinds["publish"] if since <= line["began"] < until]
    # With a lag, a publish lasts until the engine has finished the groups of the version before.
    publish = float(np.mean(publishes)) if publishes and rules.lag is None else 0.0
    return rules.num_iterations / per_token / split.trainers, besides / rules.micro_steps_per_take, publish


def _training_seconds(kinds: dict[str, Lines], since: float, until: float) -> tuple[float, float]:
    """Seconds of training for each completion token, and for each take besides.

    They are the slope and the height of the line through the takes whose training lies between the two times. The
    slope is the median of those between two takes (Theil and Sen), so that one slow step does not decide it, and the
    line meets the mean.
    """
    trained = [group for group in kinds["group"] if group["outcome"] == "trained"]
    other = [line for kind in ("take", "publish", "evaluation", "engine_start") for line in kinds[kind]]
    tokens, seconds = [], []
    bounds = [take["ended"] for take in kinds["take"]]
    for this, following in pairwise([*bounds, until]):
        if since <= this < following <= until:
            seconds.append(following - this - _seconds(other, this, following))
            tokens.append(sum(group["tokens"] for group in trained if _taken_at(group, bounds) == this))
    x, y = np.array(tokens, dtype=float), np.array(seconds)
    first, second = np.triu_indices(len(x), 1)
    apart = np.abs(x[first] - x[second]) > LEAST_DIFFERENCE * x.mean()
    per_token = float(y.mean() / x.mean())
    if not apart.any():
        return per_token, 0.0
    slopes = (y[first] - y[second])[apart] / (x[first] - x[second])[apart]
    slope = float(np.clip(np.median(slopes), LEAST_SHARE * per_token, per_token))
    return slope, float(y.mean() - slope * x.mean())


def _taken_at(group: dict[str, Any], bounds: list[float]) -> float:
    """The end of the take that handed out the group, which is the first one after the group's end."""
    return min((bound for bound in bounds if bound >= group["ended"]), default=float("inf"))


def _engine_points(groups: Lines, split: Split) -> list[tuple[float, float]]:
    """Sequences of one engine, and its tokens per second with so many.

    While every sequence has a slot, a group takes as many decode steps as its longest completion has tokens, which
    gives the time of a step for the number of sequences at that time. Where sequences wait for slots, the tokens of
    all groups and the time in which the engine had work give one point.
    """
    spans = np.array([(group["submitted"], group["finished"]) for group in groups])
    edges, active = _active(groups)
    slots = split.slots * split.engines
    durations = np.diff(edges)
    capped = np.minimum(active, slots)
    busy = float(durations[active > 0].sum())
    tokens = sum(group["tokens"] for group in groups)
    mean = float((capped * durations).sum()) / busy
    if float(durations[active > slots].sum()) > 0.1 * busy:
        return [(mean / split.engines, tokens / busy / split.engines)]
    total = np.concatenate([[0.0], np.cumsum(capped * durations)])
    longest = np.array([max(group["lengths"]) for group in groups], dtype=float)
    beside = np.diff(np.interp(spans, edges, total))[:, 0] / np.diff(spans)[:, 0]
    steps = np.diff(spans)[:, 0] / longest
    return _affine_points(beside / split.engines, steps, longest, split.slots)


def _affine_points(sequences: Array, seconds: Array, weights: Array, slots: int) -> list[tuple[float, float]]:
    """The ends of the line through the times of a decode step: `seconds = a + b · sequences`, with `a, b >= 0`. It
    goes from one sequence to the number of slots; where the number of sequences never changed, there is one point."""
    low, high = float(sequences.min()), float(sequences.max())
    middle, mean = np.average(sequences, weights=weights), np.average(seconds, weights=weights)
    spread = np.average((sequences - middle) ** 2, weights=weights)
    slope = np.average((sequences - middle) * (seconds - mean), weights=weights) / spread if spread > 1e-9 else 0.0
    slope = float(np.clip(slope, 0.0, mean / middle))
    ends = [high] if high - low < 1e-6 else [1.0, float(max(high, slots))]
    return [(end, end / float(mean + slope * (end - middle))) for end in ends]


def _active(groups: Lines) -> tuple[Array, Array]:
    """Times, and the number of unfinished sequences between each two of them. The sequences of a group are taken to
    begin together, and to end in the proportion of their lengths."""
    begins, ends = [], []
    for group in groups:
        longest, seconds = max(group["lengths"]), group["finished"] - group["submitted"]
        begins += [group["submitted"]] * len(group["lengths"])
        ends += [group["submitted"] + seconds * length / longest for length in group["lengths"]]
    times = np.array(begins + ends)
    order = np.argsort(times, kind="stable")
    changes = np.array([1] * len(begins) + [-1] * len(ends))[order]
    return times[order], np.cumsum(changes)[:-1].astype(float)


def _seconds(lines: Lines, since: float, until: float) -> float:
    """Time that the lines lasted between two moments."""
    return float(sum(max(0.0, min(line["ended"], until) - max(line["began"], since)) for line in lines))
