"""What a finished run did, from its timeline: its rules, lengths, rewards and rates, for the forecast of another run.

Guarantees: only what happened after the first take and before the end of the last optimizer step counts; evaluations
and saving count as nothing, so a forecast leaves them out.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from trl_a3po.planning.engine_points import engine_points
from trl_a3po.planning.policy_size import PolicySize
from trl_a3po.planning.rates import EngineSpeed, Rates
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulation import Split
from trl_a3po.planning.training_rates import TrainedTake, training_rates
from trl_a3po.planning.workload import Measured, Workload

Lines = list[dict[str, Any]]

FEWEST_STEPS = 3


@dataclass(frozen=True)
class FinishedRun:
    """
    Args:
        work, split, rules: as `simulate` takes them.
        engine: points of an `EngineSpeed`.
        takes: what was trained, and how long that took.
        publish_seconds: mean time that training waited for a publish.
        step_seconds: measured time of an optimizer step.
        waiting: share of that time in which the trainer waited for groups.
        policy: what was trained, `None` if the timeline does not say.
    """

    work: Workload
    engine: list[tuple[float, float]]
    takes: list[TrainedTake]
    publish_seconds: float
    split: Split
    rules: Rules
    step_seconds: float
    waiting: float
    policy: PolicySize | None

    @property
    def rates(self) -> Rates:
        return rates_of([self])


def rates_of(runs: Sequence[FinishedRun]) -> Rates:
    """The rates of several runs of one policy on the same devices. All of them tell the speed of training and of the
    engine; the time of a publish is that of the first."""
    trained = training_rates([run.takes for run in runs])
    return Rates(
        EngineSpeed(tuple(dict(point for run in reversed(runs) for point in run.engine).items())),
        1 / trained.token,
        trained.micro_step,
        runs[0].publish_seconds,
        trained.optimizer_step,
    )


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
    submitted = [group for group in kinds["group"] if group["submitted"] is not None]
    sampled = [group for group in submitted if group["finished"] is not None]
    return FinishedRun(
        work=Workload(Measured([group["lengths"] for group in sampled]), Measured(_scoring(kinds["group"]))),
        engine=engine_points(submitted, split, rules.num_generations, since),
        takes=_trained_takes(kinds, rules, split, since, until),
        publish_seconds=_publish_seconds(kinds["publish"], rules, since, until),
        split=split,
        rules=rules,
        step_seconds=seconds / len(measured),
        waiting=_seconds(kinds["take"], since, until) / seconds,
        policy=PolicySize.of_start(start),
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


def _publish_seconds(publishes: Lines, rules: Rules, since: float, until: float) -> float:
    lasted = [line["ended"] - line["began"] for line in publishes if since <= line["began"] < until]
    # With a lag, a publish lasts until the engine has finished the groups of the version before.
    return float(np.mean(lasted)) if lasted and rules.lag is None else 0.0


def _trained_takes(
    kinds: dict[str, Lines], rules: Rules, split: Split, since: float, until: float
) -> list[TrainedTake]:
    """The takes whose training lies between the two times."""
    other = [line for kind in ("take", "publish", "evaluation", "engine_start") for line in kinds[kind]]
    bounds = [take["ended"] for take in kinds["take"]]
    tokens: Counter[int] = Counter()  # of each take, which is the first that ends no earlier than the group
    for group in kinds["group"]:
        if group["outcome"] == "trained":
            tokens[bisect_left(bounds, group["ended"])] += group["tokens"]
    return [
        TrainedTake(
            tokens[number] * rules.num_iterations / split.trainers,
            rules.micro_steps_per_take,
            sum(this < step["ended"] <= following for step in kinds["step"]),
            following - this - _seconds(other, this, following),
        )
        for number, (this, following) in enumerate(pairwise([*bounds, until]))
        if since <= this < following <= until
    ]


def _seconds(lines: Lines, since: float, until: float) -> float:
    """Time that the lines lasted between two moments."""
    return float(sum(max(0.0, min(line["ended"], until) - max(line["began"], since)) for line in lines))
