"""The forecast of a finished run beside what was measured, and why the two differ where they do.

Guarantees: pure; a reason is given only where the timeline shows it.
"""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from trl_a3po.planning.earlier_run import in_words
from trl_a3po.planning.finished_run import finished_run
from trl_a3po.planning.forecast import forecast
from trl_a3po.report.run_numbers import run_numbers

Lines = list[dict[str, Any]]

STEP_DIFFERS = 0.15  # of the measured time of a step
STALENESS_DIFFERS = 0.25  # optimizer steps
STRAGGLES = 0.1  # share of the time, from which stragglers make a step longer
FEWEST_ACROSS = 3  # groups in the engine during a publish, from which the engine's versions are judged


def beside_measured(lines: Lines) -> str | None:
    """The forecast from the rates of the run itself, beside what was measured; `None` if it was too short for them."""
    try:
        run = finished_run(lines)
    except ValueError:
        return None
    made = forecast(run.work, run.rates, run.split, run.rules)
    staleness = _mean_staleness(lines)
    measured = f"{run.step_seconds:.3g} s per step, waiting {run.waiting:.0%}"
    if staleness is not None:
        measured += f"; tokens {staleness:.1f} steps stale"
    reasons = [
        *_of_steps(made.step_seconds, run.step_seconds, lines),
        *(() if staleness is None else _of_staleness(made.mean_staleness, staleness, lines)),
    ]
    parts = [f"Forecast from the rates of the run: {in_words(made)}.", f"Measured: {measured}.", *reasons]
    return " ".join([*parts, "trl-a3po plan forecasts other settings."])


def _of_steps(forecast_seconds: float, seconds: float, lines: Lines) -> Iterator[str]:
    if abs(forecast_seconds / seconds - 1) < STEP_DIFFERS:
        return
    numbers = run_numbers(lines)
    straggles = numbers is not None and numbers.waiting_for_stragglers > STRAGGLES
    if straggles and numbers is not None and numbers.stragglers_are_long is False and forecast_seconds < seconds:
        yield (
            "The forecast's step is shorter because it takes the time of sampling from the length of completions: it "
            "knows no stragglers that are slow for another reason."
        )
    else:
        yield "The timeline does not say why the times of a step differ."


def _of_staleness(forecast_staleness: float, staleness: float, lines: Lines) -> Iterator[str]:
    if abs(forecast_staleness - staleness) < STALENESS_DIFFERS:
        return
    if forecast_staleness < staleness and _keeps_versions(lines):
        yield (
            "The forecast's tokens are fresher because it expects the engine to go on with new weights once they are "
            "published: this engine sampled each group to its end from the weights of its submission."
        )
    else:
        yield "The timeline does not say why the staleness differs."


def _mean_staleness(lines: Lines) -> float | None:
    """As the report shows it: the mean over the logging steps."""
    logs = [line["logged"] for line in lines if line["kind"] == "log" and line.get("logged")]
    values = [log["a3po/staleness/mean"] for log in logs if log.get("a3po/staleness/mean") is not None]
    return fmean(values) if values else None


def _keeps_versions(lines: Lines) -> bool:
    """Whether every group that was in the engine during a publish has only tokens of the version before it."""
    published = [line["ended"] for line in lines if line["kind"] == "publish"]
    across = [
        line
        for line in lines
        if line["kind"] == "group"
        and line["submitted"] is not None
        and line["finished"] is not None
        and line.get("newest") is not None
        and any(line["submitted"] < ended < line["finished"] for ended in published)
    ]
    return len(across) >= FEWEST_ACROSS and all(line["newest"] == line["submitted_version"] for line in across)
