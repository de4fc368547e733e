"""A run on one page: reward, staleness, where the time went, and how far the policy moved.

Guarantees: draws only what was logged; a panel without its numbers is left out, and the page says so.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

History = list[dict[str, Any]]

INK, GREY, RULE = "#222222", "#777777", "#dddddd"
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"  # distinct to colour-blind readers (Okabe and Ito)
FRESH_TO_STALE = ("#d3e5f3", "#1f5f99")
SMOOTHING_STEPS = 9
MOST_BARS = 60
POINTS_A_LETTER = 5.8


def plot_run(log_history: History, path: str | Path, title: str | None = None) -> None:
    """Draw a run's `trainer.state.log_history` as a PNG at `path`, whose folder is made.

    Raises:
        ValueError: no entry has a reward.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    run_figure(log_history, title).savefig(path, dpi=150)


def run_figure(log_history: History, title: str | None = None) -> Figure:
    """The figure that `plot_run` saves."""
    entries = [entry for entry in log_history if entry.get("reward") is not None]
    if not entries:
        raise ValueError("The log history has no entry with a reward: train at least one step with logging_steps=1.")
    panels: list[tuple[str, Callable[[Axes, History], None]]] = [
        ("a3po/staleness/mean", _draw_staleness),
        ("a3po/time/wait", _draw_time),
        ("a3po/ess", _draw_trust_region),
    ]
    drawn = [draw for key, draw in panels if any(key in entry for entry in entries)]
    missing = [key for key, _ in panels if not any(key in entry for entry in entries)]

    figure = Figure(figsize=(12, 6.8), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)
    grid = figure.add_gridspec(max(1, len(drawn)), 2 if drawn else 1, width_ratios=[1.25, 1] if drawn else None)
    _draw_reward(figure.add_subplot(grid[:, 0]), entries)
    for row, draw in enumerate(drawn):
        draw(figure.add_subplot(grid[row, 1]), entries)
    for axes in figure.axes:
        _tidy(axes, entries)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
    if missing:
        figure.supxlabel(f"not logged, so not drawn: {', '.join(missing)}", fontsize=8, color=GREY)
    return figure


def waiting_share(entries: History) -> float:
    """Share of the steps' time in which the trainer waited for rollouts."""
    waited = _series(entries, "a3po/time/wait", 0.0).sum()
    worked = (_series(entries, "step_time", 0.0) - _series(entries, "a3po/time/engine_start", 0.0)).sum()
    return float(waited / max(worked, 1e-9))


def _draw_reward(axes: Axes, entries: History) -> None:
    steps, reward = _steps(entries), _series(entries, "reward")
    axes.plot(steps, reward, "o", color=BLUE, alpha=_faint(steps), markersize=5, markeredgewidth=0)
    smooth = _smooth(reward)
    axes.plot(steps, smooth, color=BLUE, linewidth=2.5)
    axes.annotate(
        f"{smooth[-1]:.2f}", (steps[-1], smooth[-1]), xytext=(7, 0), textcoords="offset points", va="center",
        color=BLUE, fontsize=12, fontweight="bold", annotation_clip=False,
    )  # fmt: skip
    _name(axes, "Reward", "mean of each batch, and its running mean")
    axes.set_xlabel("optimizer step", color=GREY, fontsize=9)
    low, high = float(np.nanmin(reward)), float(np.nanmax(reward))
    margin = 0.06 * (high - low or 1.0)
    axes.set_ylim(low - margin, high + margin)


def _draw_staleness(axes: Axes, entries: History) -> None:
    """Share of the tokens by staleness, fresh at the bottom."""
    mean = np.nanmean(_series(entries, "a3po/staleness/mean"))
    keys = {key for entry in entries for key in entry if key.startswith("a3po/d") and key.endswith("/fraction")}
    values = sorted(int(key.split("/")[1][1:]) for key in keys)
    steps, *shares = _bars(entries, *(_series(entries, f"a3po/d{d}/fraction", 0.0) for d in values))
    base = np.zeros(len(steps))
    for number, (d, share, colour) in enumerate(zip(values, shares, _ramp(len(values)), strict=True)):
        _stack(axes, steps, base, share, colour)
        base = base + share
        if share.max() > 0.2:
            at = _middle_of_largest(share)
            ink = "white" if number >= max(1, len(values) / 2) else INK
            axes.text(steps[at], base[at] - share[at] / 2, f"{d}", ha="center", va="center", fontsize=9, color=ink)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _name(axes, "Staleness", f"share of tokens by optimizer steps behind; mean {mean:.1f}")


def _draw_time(axes: Axes, entries: History) -> None:
    wait, publish = _series(entries, "a3po/time/wait", 0.0), _series(entries, "a3po/time/publish", 0.0)
    start = _series(entries, "a3po/time/engine_start", 0.0)  # once, and not part of any step's work
    train = np.maximum(_series(entries, "step_time") - start - wait - publish, 0)
    steps, *parts = _bars(entries, train, publish, wait)
    base = np.zeros(len(steps))
    for part, colour in zip(parts, (BLUE, GREEN, ORANGE), strict=True):
        _stack(axes, steps, base, part, colour)
        base = base + part
    share = waiting_share(entries)
    bound = "generation-bound" if share > 0.3 else "training-bound" if share < 0.1 else "balanced"
    legend = (("waiting", ORANGE), ("publishing", GREEN), ("training", BLUE))
    _name(axes, "Seconds a step", f"the trainer waited {share:.0%} of the time: {bound}", *legend)
    # One slow step should not hide the others.
    axes.set_ylim(0, min(np.nanmax(base) * 1.05, 3 * np.nanmedian(base)) or 1)


def _draw_trust_region(axes: Axes, entries: History) -> None:
    steps = _steps(entries)
    clipped = _series(entries, "a3po/clip/low", 0.0) + _series(entries, "a3po/clip/high", 0.0)
    for values, colour in ((_series(entries, "a3po/ess"), GREEN), (clipped, ORANGE)):
        axes.plot(steps, values, color=colour, linewidth=1.8, marker="o" if len(steps) < 5 else None, markersize=4)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    weights = _series(entries, "a3po/w/max")
    detail = "" if np.isnan(weights).all() else f"largest behavior weight w: {np.nanmax(weights):.2f}"
    _name(axes, "Trust region", detail, ("clipped tokens", ORANGE), ("effective sample size", GREEN))
    axes.set_xlabel("optimizer step", color=GREY, fontsize=9)


def _bars(entries: History, *parts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Steps and parts, averaged over neighbouring steps where there are more than can be told apart."""
    steps = _steps(entries)
    if len(steps) <= MOST_BARS:
        return steps, *parts
    bins = np.array_split(np.arange(len(steps)), MOST_BARS)
    return tuple(np.array([np.nanmean(values[inside]) for inside in bins]) for values in (steps, *parts))


def _steps(entries: History) -> np.ndarray:
    return np.array([entry.get("step", i + 1) for i, entry in enumerate(entries)], dtype=float)


def _faint(steps: np.ndarray) -> float:
    """Opacity of points that are drawn under their mean."""
    return 0.9 if len(steps) <= 5 else max(0.08, 0.35 - len(steps) / 2000)


def _series(entries: History, key: str, missing: float = np.nan) -> np.ndarray:
    values = [entry.get(key) for entry in entries]
    return np.array([missing if value is None else value for value in values], dtype=float)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred running mean; the window shrinks at both ends."""
    half = min(max(SMOOTHING_STEPS, len(values) // 30), len(values)) // 2
    return np.array([np.nanmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def _stack(axes: Axes, steps: np.ndarray, base: np.ndarray, part: np.ndarray, colour: str) -> None:
    width = 0.86 * (np.diff(steps).min() if len(steps) > 1 else 1.0)
    axes.bar(steps, part, width, bottom=base, color=colour, linewidth=0)


def _ramp(count: int) -> list[str]:
    """Colours from fresh to stale."""
    ends = [np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in FRESH_TO_STALE]
    mixed = [ends[0] + (ends[1] - ends[0]) * t for t in np.linspace(0, 1, max(count, 2))[:count]]
    return ["#" + "".join(f"{round(c):02x}" for c in colour) for colour in mixed]


def _middle_of_largest(share: np.ndarray) -> int:
    """Where a label fits: the middle of the longest stretch near the layer's largest share."""
    near = share > 0.8 * share.max()
    best, start = (0, 0), None
    for i, inside in enumerate([*near, False]):
        if inside and start is None:
            start = i
        elif not inside and start is not None:
            best = max(best, (i - start, start))
            start = None
    return best[1] + best[0] // 2


def _name(axes: Axes, name: str, detail: str, *legend: tuple[str, str]) -> None:
    """Title and detail above the axes, and the words of a legend, from the right, each in its colour."""
    at_top = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    axes.set_title(name, loc="left", fontsize=11, fontweight="bold", color=INK, pad=22)
    axes.annotate(detail, (0, 1), xytext=(0, 8), fontsize=9, color=GREY, **at_top)
    offset = 0.0
    for word, colour in legend:
        place = {"xytext": (-offset, 24), "ha": "right"}
        axes.annotate(word, (1, 1), **place, color=colour, fontsize=9, fontweight="bold", **at_top)
        offset += POINTS_A_LETTER * len(word) + 12


def _tidy(axes: Axes, entries: History) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    steps = _steps(entries)
    margin = max(0.7, 0.012 * (steps[-1] - steps[0]))
    axes.set_xlim(steps[0] - margin, steps[-1] + margin)
