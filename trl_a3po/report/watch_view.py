"""What a person wants to see of a run while it goes on, as numbers from the lines of its timeline.

Guarantees: pure; looks at the last `TAKES` batches, so that the numbers are those of the present and cost the same
however long the run is.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from trl_a3po.report.left_out import rows_left_out
from trl_a3po.report.run_numbers import STRAGGLER, RunNumbers, run_numbers
from trl_a3po.report.verdict import Verdict, verdict

Lines = list[dict[str, Any]]

TAKES = 32
SLOWEST = 3  # groups that are named
SHARE = re.compile(r"a3po/d(\d+)/fraction")


@dataclass(frozen=True)
class SlowGroup:
    """A group that took long.

    Args:
        prompt: its place in the prompt stream.
        seconds: how long it took.
        times: how many times the median of all groups.
    """

    prompt: int
    seconds: float
    times: float


@dataclass(frozen=True)
class WatchView:
    """What is shown of a run. Shares are from 0 to 1, times in seconds.

    Args:
        step, max_steps: optimizer steps done, and of the whole run; `None` if the timeline does not say.
        step_seconds: time from one optimizer step to the next.
        starting: no optimizer step has been done yet since training began, or was resumed.
        ended: training has stopped.
        error: what ended the run, if it was an error.
        process: that trains, as `this_process` describes it; `None` if the timeline does not say.
        last_written: time of the last line, since 1970.
        rewards: the mean reward at each logging step.
        staleness: share of the trained tokens by their staleness.
        take: the line of the last take, which says what the queue held when the take began.
        tokens_per_second: of the engine, while it is busy if it says when it is.
        outcomes: how many attempts ended as "trained", "rejected", "failed" and "unused".
        left_out: reason -> how many rows of the data were left out for it.
        numbers, verdict: `None` until three batches have been trained.
        slow_rewards, stragglers: the groups that took longest to score, and those that took longest to sample, from
            `STRAGGLER` times the median.
        warnings: texts of the warnings of this package.
    """

    step: int
    max_steps: int | None
    step_seconds: float | None
    starting: bool
    ended: bool
    error: str | None
    process: dict[str, Any] | None
    last_written: float
    rewards: list[float]
    staleness: dict[int, float]
    take: dict[str, Any] | None
    tokens_per_second: float | None
    outcomes: Counter[str]
    left_out: Counter[str]
    numbers: RunNumbers | None
    verdict: Verdict | None
    slow_rewards: list[SlowGroup] = field(default_factory=list)
    stragglers: list[SlowGroup] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def watch_view(lines: Lines) -> WatchView | None:
    """The view of a run, `None` before its first line.

    Args:
        lines: as `read_timeline` returns them.
    """
    if not lines:
        return None
    start, recent = _recent(lines)
    kinds = {kind: [line for line in recent if line["kind"] == kind] for kind in ("step", "take", "group", "log")}
    logs = [line["logged"] or {} for line in lines if line["kind"] == "log"]
    steps, takes, groups = kinds["step"], kinds["take"], kinds["group"]
    numbers = run_numbers([start, *recent], last_takes=TAKES)
    return WatchView(
        step=max((line["version"] for line in lines if line["kind"] in ("start", "step")), default=0),
        max_steps=start.get("max_steps"),
        step_seconds=(steps[-1]["ended"] - steps[0]["ended"]) / (len(steps) - 1) if len(steps) > 1 else None,
        starting=not steps,
        ended=lines[-1]["kind"] == "end",
        error=lines[-1].get("error") if lines[-1]["kind"] == "end" else None,
        process=start.get("process"),
        last_written=max(line.get("time") or line.get("ended") or 0.0 for line in lines[-3:]),
        rewards=[log["reward"] for log in logs if log.get("reward") is not None],
        staleness=_staleness([line["logged"] or {} for line in kinds["log"]]),
        take=takes[-1] if takes else None,
        tokens_per_second=_speed(takes),
        outcomes=Counter(line["outcome"].split(":")[0] for line in lines if line["kind"] == "group"),
        left_out=rows_left_out(lines),
        numbers=numbers,
        verdict=None if numbers is None else verdict(numbers),
        slow_rewards=_slowest(groups, "scoring", "scored", 0.0),
        stragglers=_slowest(groups, "submitted", "finished", STRAGGLER),
        warnings=[line["text"] for line in lines if line["kind"] == "warning"],
    )


def _recent(lines: Lines) -> tuple[dict[str, Any], Lines]:
    """The first line of the last process, and its lines of the last `TAKES` batches and one more."""
    takes = 0
    for number in range(len(lines) - 1, -1, -1):
        takes += lines[number]["kind"] == "take"
        if takes > TAKES + 1 or lines[number]["kind"] == "start":
            start = next(line for line in reversed(lines[: number + 1]) if line["kind"] == "start")
            return start, lines[number + 1 :]
    return {}, lines


def _staleness(logs: Lines) -> dict[int, float]:
    """Mean shares over the logging steps, in order."""
    found = [{int(match[1]): log[key] for key in log if (match := SHARE.fullmatch(key))} for log in logs]
    found = [shares for shares in found if shares]
    values = sorted({value for shares in found for value in shares})
    return {value: fmean(shares.get(value) or 0.0 for shares in found) for value in values}


def _speed(takes: Lines) -> float | None:
    if len(takes) < 2 or "tokens" not in takes[0]:
        return None
    first, last = takes[0], takes[-1]
    seconds = (last["busy"] - first["busy"]) or (last["ended"] - first["ended"])
    return float((last["tokens"] - first["tokens"]) / seconds)


def _slowest(groups: Lines, since: str, until: str, least: float) -> list[SlowGroup]:
    """The groups that took longest from `since` to `until`, and at least `least` times the median."""
    seconds = [(g[until] - g[since], g["prompt"]) for g in groups if g[since] is not None and g[until] is not None]
    usual = median([taken for taken, _ in seconds]) if seconds else 0.0
    slow = [SlowGroup(prompt, taken, taken / usual) for taken, prompt in seconds if usual and taken >= least * usual]
    return sorted(slow, key=lambda group: -group.seconds)[:SLOWEST]
