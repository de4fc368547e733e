"""What the runs of the study left, and what is computed from it: pure functions of the files.

Guarantees: `results.jsonl` has one line for each run, whether finished or cut; where a run is known twice, the
finished or longer one counts; only finished runs enter summaries, tables and verdicts.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning.runs import Run

RESULTS = "results.jsonl"
Steps = dict[str, list[float | None]]  # name -> its value at every step
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of pairs -> the 97.5% quantile of Student's t, for an interval of 95%."""


@dataclass(frozen=True)
class Result:
    """A run, its steps, and what its last line says (nothing if it was cut)."""

    run: Run
    steps: Steps
    end: dict[str, float]

    @property
    def done(self) -> bool:
        return bool(self.end)

    def __len__(self) -> int:
        return len(self.steps.get("reward", []))


def read_run(path: Path) -> Result | None:
    """The result in the file of a run; `None` if not even its first line was written. A last line that was cut is
    left out.

    Raises:
        ValueError: the file holds something else.
    """
    whole = path.read_bytes().rpartition(b"\n")[0]
    lines = [_read_line(path, number, line) for number, line in enumerate(whole.split(b"\n"), 1) if line]
    if not lines:
        return None
    with _lines_of_the_study(path):
        steps = columns([line for line in lines if "step" in line])
        return _checked(Run(**lines[0]["run"]), steps, next((line for line in lines if "done" in line), {}))


def first_steps(results: Iterable[Result], count: int) -> list[Result]:
    """The first `count` steps of the runs that have as many, each as a finished run. What only the last line of a run
    says is NaN."""
    return [
        Result(
            one.run,
            {name: values[:count] for name, values in one.steps.items()},
            {"done": True, "held_out": math.nan},
        )
        for one in results
        if len(one) >= count
    ]


def columns(steps: Sequence[Mapping[str, float]]) -> Steps:
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: [step.get(name) for step in steps] for name in names}


def read_results(folder: Path) -> list[Result]:
    """The results in `results.jsonl` and in the files of the runs. Raises `ValueError` for a file that holds
    something else."""
    found: dict[str, Result] = {}
    for result in [*_read_table(folder / RESULTS), *map(read_run, sorted((folder / "runs").glob("*.jsonl")))]:
        if result is not None:
            known = found.get(result.run.name)
            if known is None or (result.done, len(result)) >= (known.done, len(known)):
                found[result.run.name] = result
    return list(found.values())


def _read_table(path: Path) -> Iterable[Result]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, text in enumerate(lines, 1):
        if text.strip():
            line = _read_line(path, number, text)
            with _lines_of_the_study(path):
                yield _checked(Run(**line["run"]), line["steps"], line["end"])


def _checked(run: Run, steps: Steps, end: dict[str, float]) -> Result:
    """Raises `KeyError`, `IndexError`, `AttributeError` or `TypeError` for a part that is of another kind."""
    for name, kind in (("staleness", int), ("seed", int), ("learning_rate", float | int), ("method", str)):
        if not isinstance(getattr(run, name), kind):
            raise TypeError(f"{name} is {getattr(run, name)!r}")
    for name, values in steps.items():
        if not all(value is None or isinstance(value, float | int) for value in values):
            raise TypeError(f"{name} is no column of numbers")
    if end and math.isnan(end["held_out"] + (steps["reward"][-1] or 0.0)):
        raise TypeError("a reward is NaN")
    return Result(run, steps, end)


def _read_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        read = json.loads(line)
    except ValueError as error:  # of JSON, or of UTF-8
        raise _not_of_the_study(path, f"line {number} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise _not_of_the_study(path, f"line {number} is {type(read).__name__} in JSON, and not a dictionary")
    return read


@contextmanager
def _lines_of_the_study(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise _not_of_the_study(path, f"{type(error).__name__}: {error}") from error


def _not_of_the_study(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is no file of this study ({why}): remove it, or pass another folder as --output.")


def write_results(folder: Path, results: Sequence[Result]) -> None:
    lines = [json.dumps({"run": vars(one.run), "steps": one.steps, "end": one.end}) + "\n" for one in results]
    written = folder / f"{RESULTS}.{os.getpid()}.new"  # a report may be made while a study is trained
    written.write_text("".join(lines))
    os.replace(written, folder / RESULTS)


def summary(steps: Mapping[str, Sequence[float | None]], staleness: int) -> dict[str, float]:
    """Statistics of the steps after the lag has been reached; reward and entropy are those of the last fifth.

    `contraction` is log r / log ρ where ρ is largest. What a run does not log is NaN.
    """
    count = len(steps["reward"])

    def values(name: str, begin: int) -> list[float]:
        return [value for value in steps.get(name, [])[begin:] if value is not None]

    def over(function: Callable[[list[float]], float], name: str, begin: int = min(staleness, count - 1)) -> float:
        found = values(name, begin)
        return function(found) if found else math.nan

    last = count - max(1, count // 5)
    return {
        "reward": over(statistics.mean, "reward", last),
        "whole reward": over(statistics.mean, "reward", 0),
        "entropy": over(statistics.mean, "entropy", last),
        "clipped": over(statistics.mean, "clip_low") + over(statistics.mean, "clip_high"),
        "w min": over(min, "w_min"),
        "w max": over(max, "w_max"),
        "r min": over(min, "r_min"),
        "r max": over(max, "r_max"),
        "rho max": over(max, "rho_max"),
        "ESS": over(statistics.mean, "ess"),
        "contraction": _contraction(values("r_max", staleness), values("rho_max", staleness)),
        "step seconds": over(statistics.median, "step_time"),
    }


def _contraction(r: Sequence[float], rho: Sequence[float]) -> float:
    widest = max(zip(rho, r, strict=True), default=(1.0, 1.0))
    return math.log(widest[1]) / math.log(widest[0]) if widest[0] > 1 and widest[1] > 0 else math.nan


def spread(values: Sequence[float]) -> str:
    """The mean of the seeds and their range."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    mean = f"{statistics.mean(known):.3g}"
    return mean if len(known) == 1 else f"{mean} ({min(known):.3g} to {max(known):.3g})"


def seconds_to(result: Result, reward: float, window: int = 5) -> float:
    """Seconds until the mean reward of the last `window` steps first reached `reward`; NaN if it never did."""
    rewards, seconds = result.steps["reward"], result.steps["seconds"]
    for end in range(window, len(rewards) + 1):
        if statistics.mean(rewards[end - window : end]) >= reward:
            return float(seconds[end - 1] or 0.0)
    return math.nan


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Differences `one - other` for the seeds that both have."""
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def judge(differences: Sequence[float], margin: float = 0.0) -> str:
    """What differences between pairs of runs of the same seed say of the claim that they are above `-margin`.

    "holds" and "refuted" need the 95% interval of the mean difference on one side of `-margin`; otherwise "all seeds
    agree" or "all seeds are against it", which three seeds do by chance once in eight; otherwise "open".
    """
    shifted = [difference + margin for difference in differences]
    if not shifted:
        return "not run"
    half = half_width(shifted)
    mean = statistics.mean(shifted)
    if mean - half > 0:
        return "holds"
    if mean + half < 0:
        return "refuted"
    if min(shifted) > 0:
        return "open, all seeds agree" if len(shifted) > 1 else "open, one seed agrees"
    if max(shifted) < 0:
        return "open, all seeds are against it" if len(shifted) > 1 else "open, one seed is against it"
    return "open"


def half_width(differences: Sequence[float]) -> float:
    """Half of the 95% interval of the mean, by Student's t; infinite for a single difference."""
    count = len(differences)
    if count < 2:
        return math.inf
    return T_95.get(count, 2.571) * statistics.stdev(differences) / math.sqrt(count)
