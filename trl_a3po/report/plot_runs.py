"""Several runs in one image: reward, staleness, where the time went, w and r; for a single run also its timeline.

Guarantees: a run has the same colour in every panel; a run that did not log what a panel shows is left out of that
panel, and the image says so. `plot_run` of `report/plot_run.py` shows one run in more detail.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from trl_a3po.report.chart_style import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    RULE,
    EndLabel,
    image_path,
    markers_if_few,
    padded_layout,
    remove_frame,
    style_step_axes,
    write_end_labels,
    write_title,
)
from trl_a3po.report.gantt import LEGEND, PALE_AMBER, Lines, draw_gantt
from trl_a3po.report.history_arrays import (
    TIMES,
    History,
    entries_with,
    running_mean,
    series,
    steps_covered,
    time_split,
)

WIDE_RATIO = 4.0  # largest over smallest w or r, above which the scale is logarithmic
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", AMBER, "#56b4e9", INK)  # Okabe and Ito


def plot_runs(runs: Sequence[tuple[str, History]], path: str | Path, timeline: Lines | None = None) -> None:
    """Draw runs, as `(name, log_history)` pairs, and save the image as `path`, whose folder is created.

    Args:
        timeline: the timeline of a single run (`read_timeline`), whose last part is drawn below the panels.

    Raises:
        ValueError: there are no runs, more runs than colours, or no run logged what a panel needs; or `path` is a
            folder.
    """
    path = image_path(path)
    figure = runs_figure(runs, timeline)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def runs_figure(runs: Sequence[tuple[str, History]], timeline: Lines | None = None) -> Figure:
    """The figure that `plot_runs` saves. Raises as `plot_runs` does."""
    if not 1 <= len(runs) <= len(COLOURS):
        raise ValueError(f"One image can distinguish 1 to {len(COLOURS)} runs, but there are {len(runs)}: draw fewer.")
    panel_runs = [_runs_in_panel(panel, runs) for panel in PANELS]
    if not any(drawn for drawn, _ in panel_runs):
        raise ValueError(
            "No run logged anything to plot (a reward, staleness, step time, w or r): train at least one optimizer "
            "step, with logging_steps no larger than the number of steps."
        )
    with_timeline = timeline if any(line["kind"] == "take" for line in timeline or ()) else None
    layout = padded_layout(w_pad=0.14, h_pad=0.12, wspace=0.05, hspace=0.06)
    figure = Figure(figsize=(12, 11.0 if with_timeline else 7.6), layout=layout, facecolor="white")
    grid = figure.add_gridspec(3 if with_timeline else 2, 6)
    for panel, (drawn, missing) in zip(PANELS, panel_runs, strict=True):
        _draw_panel(figure.add_subplot(grid[panel.place]), panel, drawn, missing)
    if with_timeline:
        _draw_timeline(figure.add_subplot(grid[2, :]), with_timeline)
    named = zip(runs, COLOURS, strict=False)
    handles = [figure.axes[0].plot([], [], color=colour, linewidth=3, label=name)[0] for (name, _), colour in named]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=11)
    return figure


class RunInPanel(NamedTuple):
    name: str
    colour: str
    entries: History


@dataclass(frozen=True)
class Panel:
    """One panel of the figure.

    Args:
        keys: what a run must have logged.
        place: rows and columns of the grid.
        over_steps: whether the x axis is the optimizer step.
    """

    title: str
    detail: str
    keys: tuple[str, ...]
    draw: Callable[[Axes, list[RunInPanel]], None]
    place: tuple[slice, slice]
    over_steps: bool = True


def _runs_in_panel(panel: Panel, runs: Sequence[tuple[str, History]]) -> tuple[list[RunInPanel], list[str]]:
    """The runs that logged what the panel needs, and the names of the others."""
    drawn, missing = [], []
    for (name, history), colour in zip(runs, COLOURS, strict=False):
        entries, absent = entries_with(history, panel.keys)
        if absent:
            missing.append(name)
        else:
            drawn.append(RunInPanel(name, colour, entries))
    return drawn, missing


def _draw_panel(axes: Axes, panel: Panel, runs: list[RunInPanel], missing: list[str]) -> None:
    if not runs:
        axes.set_axis_off()
    else:
        panel.draw(axes, runs)
        if panel.over_steps:
            last = max(run.entries[-1]["step"] for run in runs)
            first = min(run.entries[0]["step"] for run in runs)
            margin = 0.02 * (last - first) + 0.3
            style_step_axes(axes, (first - margin, last + margin))
            axes.set_xlabel("optimizer step", color=GREY, fontsize=9)
    write_title(axes, panel.title, panel.detail + (f"; not logged by {', '.join(missing)}" if missing else ""))


def _draw_lines(axes: Axes, runs: list[RunInPanel], key: str, width: float = 2.0) -> list[EndLabel]:
    """Draw a line for each run. Returns the labels of their last points."""
    labels = []
    for _, colour, entries in runs:
        steps, values = series(entries, "step"), series(entries, key)
        axes.plot(steps, values, color=colour, linewidth=width, **markers_if_few(len(steps)))
        labels.append((f"{values[-1]:.2f}", float(values[-1]), colour))
    return labels


def _write_labels(axes: Axes, runs: list[RunInPanel], labels: list[EndLabel]) -> None:
    write_end_labels(axes, max(run.entries[-1]["step"] for run in runs), labels, fontsize=9)


def _draw_reward(axes: Axes, runs: list[RunInPanel]) -> None:
    labels = []
    for _, colour, entries in runs:
        steps, values = series(entries, "step"), series(entries, "reward")
        axes.plot(steps, values, "o", color=colour, alpha=0.25, markersize=3.5, markeredgewidth=0)
        smooth = running_mean(values)
        axes.plot(steps, smooth, color=colour, linewidth=2, **markers_if_few(len(steps)))
        labels.append((f"{smooth[-1]:.2f}", float(smooth[-1]), colour))
    _write_labels(axes, runs, labels)


def _draw_staleness(axes: Axes, runs: list[RunInPanel]) -> None:
    for _, colour, entries in runs:
        low, high = series(entries, "a3po/staleness/min"), series(entries, "a3po/staleness/max")
        axes.fill_between(series(entries, "step"), low, high, color=colour, alpha=0.14, linewidth=0)
    _write_labels(axes, runs, _draw_lines(axes, runs, "a3po/staleness/mean"))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _draw_time(axes: Axes, runs: list[RunInPanel]) -> None:
    """A bar for each run: seconds of its mean optimizer step."""
    for row, (name, colour, entries) in enumerate(runs):
        steps = steps_covered(entries)
        wait, publish, train = (float((part * steps).sum() / steps.sum()) for part in time_split(entries))
        left = 0.0
        for seconds, opacity in ((train, 1.0), (publish, 0.6), (wait, 0.25)):
            axes.barh(row, seconds, 0.55, left=left, color=colour, alpha=opacity, linewidth=0)
            left += seconds
        share = wait / max(left, 1e-9)
        axes.annotate(
            f"{name}: {left:.2g} s, {share:.0%} waiting", (0, row - 0.32), xytext=(0, 2), textcoords="offset points",
            va="bottom", color=colour, fontsize=9, fontweight="bold",
        )  # fmt: skip
    axes.set_ylim(len(runs) - 0.5, -0.8)
    axes.set_yticks([])
    remove_frame(axes)
    axes.set_xlabel("seconds", color=GREY, fontsize=9)


def _draw_w(axes: Axes, runs: list[RunInPanel]) -> None:
    _draw_ratio(axes, runs, "w")


def _draw_r(axes: Axes, runs: list[RunInPanel]) -> None:
    _draw_ratio(axes, runs, "r")


def _draw_ratio(axes: Axes, runs: list[RunInPanel], name: str) -> None:
    """The largest value of each step and, thinner, the smallest; on a logarithmic scale where they are far apart."""
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    axes.ticklabel_format(axis="y", useOffset=False)
    _draw_lines(axes, runs, f"a3po/{name}/min", width=0.8)
    _draw_lines(axes, runs, f"a3po/{name}/max", width=1.6)
    lowest, highest = axes.get_ylim()
    if lowest <= 0 or highest / lowest > WIDE_RATIO:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", which="minor", length=0)


def _draw_timeline(axes: Axes, timeline: Lines) -> None:
    takes = draw_gantt(axes, timeline)
    remove_frame(axes)
    axes.spines["bottom"].set_color(RULE)
    axes.set_xlabel("seconds", color=GREY, fontsize=9)
    legible = {RULE: GREY, PALE_AMBER: "#b8892f"}  # on white
    words = [(name, legible.get(colour, colour), None) for name, colour in LEGEND]
    write_title(axes, "Timeline", f"the last {takes} takes (lines): groups above, the trainer below", words)


PANELS = (
    Panel("Reward", "running mean; points: batches", ("reward",), _draw_reward, (slice(0, 1), slice(0, 3))),
    Panel(
        "Staleness",
        "mean of a batch's tokens; band: min to max",
        ("a3po/staleness/mean", "a3po/staleness/min", "a3po/staleness/max"),
        _draw_staleness,
        (slice(0, 1), slice(3, 6)),
    ),
    Panel(
        "Seconds a step",
        "training, publishing (paler), waiting (palest)",
        TIMES,
        _draw_time,
        (slice(1, 2), slice(0, 2)),
        over_steps=False,
    ),
    Panel(
        "Behavior weight w",
        "largest, smallest (thin); uncapped",
        ("a3po/w/min", "a3po/w/max"),
        _draw_w,
        (slice(1, 2), slice(2, 4)),
    ),
    Panel(
        "PPO ratio r",
        "largest, smallest (thin)",
        ("a3po/r/min", "a3po/r/max"),
        _draw_r,
        (slice(1, 2), slice(4, 6)),
    ),
)
