"""`write_report`: one or several runs as one HTML page that needs nothing else.

Guarantees: the page loads nothing: scripts, styles and data are in it, and its content security policy keeps a browser
from any request; whatever a run, a prompt or a completion holds is shown as text; the page is written whole or not at
all.
"""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jinja2 import Environment
from plotly.offline import get_plotlyjs

from trl_a3po import __version__
from trl_a3po.report.html.activity import seconds_by_phase
from trl_a3po.report.html.figures import (
    RUN_COLOURS,
    anything_outside,
    charts_of_comparison,
    charts_of_run,
    staleness_values,
    times_of_step,
)
from trl_a3po.report.html.reported_run import ReportedRun
from trl_a3po.report.html.samples import packed_samples
from trl_a3po.report.left_out import rows_left_out
from trl_a3po.report.verdict import verdict_of
from trl_a3po.rollout.left_out import reasons_in_words

MOST_RUNS = len(RUN_COLOURS)


def write_report(runs: Sequence[ReportedRun], path: str | Path) -> None:
    """Write the report on `runs` to `path`, whose folder is created.

    Raises:
        ValueError: there is no run, or there are too many; or `path` is a folder.
    """
    path = Path(path)
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ValueError(f"A report shows 1 to {MOST_RUNS} runs, and was given {len(runs)}: leave some out.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of an HTML file.")
    page = report_page(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)


def report_page(runs: Sequence[ReportedRun]) -> str:
    """The page that `write_report` writes."""
    folder = files("trl_a3po.report.html")
    parts = {name: (folder / f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js", "html")}
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(parts["html"])
    charts = {"compare": charts_of_comparison(runs)} | {str(i): charts_of_run(run) for i, run in enumerate(runs)}
    return template.render(
        runs=[_shown(run) for run in runs],
        different_settings=_different_settings(runs),
        compared=sorted(charts["compare"]),
        charts=[sorted(charts[str(i)]) for i in range(len(runs))],
        samples=[packed_samples(run.rollouts) for run in runs],
        data=_as_script_data(charts),
        css=parts["css"],
        js=parts["js"],
        plotly=get_plotlyjs(),
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _shown(run: ReportedRun) -> dict[str, Any]:
    """What the template shows of a run."""
    verdict = verdict_of(run.lines)
    said = () if verdict is None else (verdict.sentence,)
    return {
        "name": run.name,
        "verdict": None if verdict is None else {"limit": verdict.limit, "sentence": verdict.sentence},
        "facts": _facts(run),
        "phases": _phases(run),
        "outcomes": run.outcomes,
        "warnings": run.warnings,
        "problems": [finding for finding in run.findings if finding.startswith("PROBLEM")],
        "findings": [finding for finding in run.findings if finding not in said and not finding.startswith("PROBLEM")],
        "nothing_outside": anything_outside(run.steps) is False,
        "group_every": _group_every(run),
        "settings": {name: _text(value) for name, value in run.changed_settings.items()},
        "all_settings": {name: _text(value) for name, value in sorted(run.settings.items())},
        "packages": run.start.get("packages", {}),
        "kept": len(run.rollouts),
    }


def _facts(run: ReportedRun) -> dict[str, str]:
    """The few numbers at the top, in words."""
    steps, facts = run.steps, {}
    if steps:
        facts["optimizer steps"] = f"{steps[-1]['step']}"
    if run.seconds:
        facts["time"] = _duration(run.seconds)
    rewards = [entry["reward"] for entry in steps if entry["reward"] is not None]
    if rewards:
        tenth = max(1, len(rewards) // 10)
        facts["mean reward, first and last tenth"] = f"{fmean(rewards[:tenth]):.3g} → {fmean(rewards[-tenth:]):.3g}"
    stale = [entry["a3po/staleness/mean"] for entry in steps if entry.get("a3po/staleness/mean") is not None]
    if stale:
        facts["staleness, mean and largest"] = f"{fmean(stale):.2f}, {max(staleness_values(steps), default=0)}"
    seconds = times_of_step(run)
    if seconds:
        facts["a step, after the first"] = f"{sum(seconds.values()):.2f} s"
        facts["of which the trainer waited"] = f"{seconds['waiting'] / max(1e-9, sum(seconds.values())):.0%}"
    tokens = sum(line["tokens"] for line in run.of_kind("group"))
    if tokens and run.seconds:
        facts["completion tokens"] = f"{tokens:,} ({tokens / run.seconds:,.0f} a second)"
    if left_out := rows_left_out(run.lines):
        facts["rows left out"] = f"{left_out.total()} ({reasons_in_words(left_out)})"
    return facts


def _phases(run: ReportedRun) -> list[tuple[str, list[str]]]:
    """For each phase of a group: median, 95th percentile and largest of its seconds."""
    table = []
    for phase, seconds in seconds_by_phase(run.lines).items():
        if seconds:
            ordered = sorted(seconds)
            numbers = (median(ordered), ordered[int(0.95 * (len(ordered) - 1))], ordered[-1])
            table.append((phase, [f"{number:.2f}" for number in numbers]))
    return table


def _group_every(run: ReportedRun) -> str | None:
    """Seconds in which the engine had work, for each group that it finished."""
    spans = [(g["submitted"], g["finished"]) for g in run.of_kind("group") if g["submitted"] and g["finished"]]
    busy, until = 0.0, 0.0
    for submitted, finished in sorted(spans):
        busy += max(0.0, finished - max(submitted, until))
        until = max(until, finished)
    if not spans:
        return None
    seconds = busy / len(spans)
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def _different_settings(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """The settings in which the runs differ, with the value of each."""
    names = sorted({name for run in runs for name in run.settings} - {"output_dir", "logging_dir", "run_name"})
    table = [(name, [_text(run.settings.get(name)) if run.settings else "" for run in runs]) for name in names]
    return [(name, values) for name, values in table if len(set(values)) > 1]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


def _as_script_data(value: Any) -> str:
    """JSON that ends no script element, whatever it holds."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
