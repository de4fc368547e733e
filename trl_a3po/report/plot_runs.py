"""Runs side by side in one picture: reward, staleness, where the time went, w and r; of one run its timeline too.

Guarantees: a run has one colour everywhere; a run that did not log what a panel shows is left out of that panel, and
the picture says so; `plot_run` of `report/plot_run.py` shows one run in more detail.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

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
    dots,
    end_labels,
    image_path,
    name_axes,
    tidy_axes,
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

WIDE = 4.0  # largest over smallest w or r, above which the scale is logarithmic
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", AMBER, "#56b4e9", INK)  # Okabe and Ito
Named = list[tuple[str, History]]


def plot_runs(runs: Sequence[tuple[str, History]], path: str | Path, timeline: Lines | None = None) -> None:
    """Draw runs, as `(name, log_history)` pairs, as a PNG at `path`, whose folder is made.

    Args:
        timeline: of a single run: the end of it is drawn below (`read_timeline`).

    Raises:
        ValueError: there are no runs, more than there are colours, or none logged what a panel needs; `path` is a
            folder.
    """
    path = image_path(path)
    figure = runs_figure(runs, timeline)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def runs_figure(runs: Sequence[tuple[str, History]], timeline: Lines | None = None) -> Figure:
    """The figure that `plot_runs` saves. Raises as `plot_runs` does."""
    if not 1 <= len(runs) <= len(COLOURS):
        raise ValueError(f"{len(runs)} runs cannot be told apart in one picture: draw 1 to {len(COLOURS)}.")
    colours = [(name, COLOURS[i]) for i, (name, _) in enumerate(runs)]
    logged = {panel: [entries_with(history, keys) for _, history in runs] for panel, (keys, _) in PANELS.items()}
    drawn = {
        panel: [(*colours[i], entries) for i, (entries, absent) in enumerate(found) if not absent]
        for panel, found in logged.items()
    }
    if not any(drawn.values()):
        raise ValueError(
            "No run logged anything to plot (a reward, staleness, step time, w or r): train at least one optimizer "
            "step, with logging_steps no larger than the number of steps."
        )
    below = any(line["kind"] == "take" for line in timeline or ())
    figure = Figure(figsize=(12, 11.0 if below else 7.6), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.14, h_pad=0.12, wspace=0.05, hspace=0.06)
    grid = figure.add_gridspec(2 + below, 6)
    for (panel, (_, draw)), place in zip(PANELS.items(), PLACES, strict=True):
        axes = figure.add_subplot(grid[place])
        _tidy_empty(axes) if not drawn[panel] else draw(axes, drawn[panel])
        if drawn[panel] and panel != TIME:
            last = max(entries[-1]["step"] for *_, entries in drawn[panel])
            first = min(entries[0]["step"] for *_, entries in drawn[panel])
            tidy_axes(axes, (first - 0.02 * (last - first) - 0.3, last + 0.02 * (last - first) + 0.3))
            axes.set_xlabel("optimizer step", color=GREY, fontsize=9)
        missing = [name for (name, _), (_, absent) in zip(runs, logged[panel], strict=True) if absent]
        details = DETAILS[panel] + (f"; not logged by {', '.join(missing)}" if missing else "")
        name_axes(axes, panel, details)
    if below:
        _draw_timeline(figure.add_subplot(grid[2, :]), timeline)
    handles = [figure.axes[0].plot([], [], color=colour, linewidth=3, label=name)[0] for name, colour in colours]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=11)
    return figure


def _lines(axes: Axes, runs: list, key: str, width: float = 2.0) -> list[tuple[str, float, str]]:
    """A line of each run, and the label of its last point."""
    labels = []
    for _, colour, entries in runs:
        steps, values = series(entries, "step"), series(entries, key)
        axes.plot(steps, values, color=colour, linewidth=width, **dots(len(steps)))
        labels.append((f"{values[-1]:.2f}", values[-1], colour))
    return labels


def _label(axes: Axes, runs: list, labels: list[tuple[str, float, str]]) -> None:
    end_labels(axes, max(entries[-1]["step"] for *_, entries in runs), labels, fontsize=9)


def _draw_reward(axes: Axes, runs: list) -> None:
    labels = []
    for _, colour, entries in runs:
        steps, values = series(entries, "step"), series(entries, "reward")
        axes.plot(steps, values, "o", color=colour, alpha=0.25, markersize=3.5, markeredgewidth=0)
        smooth = running_mean(values)
        axes.plot(steps, smooth, color=colour, linewidth=2, **dots(len(steps)))
        labels.append((f"{smooth[-1]:.2f}", smooth[-1], colour))
    _label(axes, runs, labels)


def _draw_staleness(axes: Axes, runs: list) -> None:
    for _, colour, entries in runs:
        low, high = series(entries, "a3po/staleness/min"), series(entries, "a3po/staleness/max")
        axes.fill_between(series(entries, "step"), low, high, color=colour, alpha=0.14, linewidth=0)
    _label(axes, runs, _lines(axes, runs, "a3po/staleness/mean"))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _draw_time(axes: Axes, runs: list) -> None:
    """A bar per run: seconds of an optimizer step, on average."""
    names = []
    for row, (name, colour, entries) in enumerate(runs):
        steps = steps_covered(entries)
        wait, publish, train = (float((part * steps).sum() / steps.sum()) for part in time_split(entries))
        left = 0.0
        for seconds, opacity in ((train, 1.0), (publish, 0.6), (wait, 0.25)):
            axes.barh(row, seconds, 0.55, left=left, color=colour, alpha=opacity, linewidth=0)
            left += seconds
        names.append(name)
        share = wait / max(left, 1e-9)
        axes.annotate(
            f"{name}: {left:.2g} s, {share:.0%} waiting", (0, row - 0.32), xytext=(0, 2), textcoords="offset points",
            va="bottom", color=colour, fontsize=9, fontweight="bold",
        )  # fmt: skip
    axes.set_ylim(len(names) - 0.5, -0.8)
    axes.set_yticks([])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    axes.set_xlabel("seconds", color=GREY, fontsize=9)


def _draw_w(axes: Axes, runs: list) -> None:
    _ratio(axes, runs, "w")


def _draw_r(axes: Axes, runs: list) -> None:
    _ratio(axes, runs, "r")


def _ratio(axes: Axes, runs: list, name: str) -> None:
    """The largest and, thinner, the smallest of each step; on a logarithmic scale where they lie far apart."""
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    axes.ticklabel_format(axis="y", useOffset=False)
    _lines(axes, runs, f"a3po/{name}/min", width=0.8)
    _lines(axes, runs, f"a3po/{name}/max", width=1.6)
    lowest, highest = axes.get_ylim()
    if lowest <= 0 or highest / lowest > WIDE:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", which="minor", length=0)


def _draw_timeline(axes: Axes, timeline: Lines) -> None:
    takes = draw_gantt(axes, timeline)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    axes.set_xlabel("seconds", color=GREY, fontsize=9)
    legible = {RULE: GREY, PALE_AMBER: "#b8892f"}  # on white
    words = [(what, legible.get(colour, colour), None) for what, colour in LEGEND]
    name_axes(axes, "Timeline", f"the last {takes} takes (lines): groups above, the trainer below", words)


def _tidy_empty(axes: Axes) -> None:
    axes.set_axis_off()


TIME = "Seconds a step"
PANELS: dict[str, tuple[tuple[str, ...], Callable[[Axes, list], None]]] = {
    "Reward": (("reward",), _draw_reward),
    "Staleness": (("a3po/staleness/mean", "a3po/staleness/min", "a3po/staleness/max"), _draw_staleness),
    TIME: (TIMES, _draw_time),
    "Behavior weight w": (("a3po/w/min", "a3po/w/max"), _draw_w),
    "PPO ratio r": (("a3po/r/min", "a3po/r/max"), _draw_r),
}
PLACES = (
    (slice(0, 1), slice(0, 3)),
    (slice(0, 1), slice(3, 6)),
    (slice(1, 2), slice(0, 2)),
    (slice(1, 2), slice(2, 4)),
    (slice(1, 2), slice(4, 6)),
)
DETAILS = {
    "Reward": "running mean; points: batches",
    "Staleness": "mean of a batch's tokens; band: min to max",
    TIME: "training, publishing (paler), waiting (palest)",
    "Behavior weight w": "largest, smallest (thin); uncapped",
    "PPO ratio r": "largest, smallest (thin)",
}
