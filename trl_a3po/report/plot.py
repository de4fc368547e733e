"""A run on one page: reward, staleness, where the time went, and how far the policy moved.

Guarantees: draws only what was logged; a panel without its numbers is left out, and the page says so.
"""

from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

History = list[dict[str, Any]]

INK, GREY, RULE = "#222222", "#777777", "#dddddd"
BLUE, ORANGE, GREEN, AMBER = "#0072b2", "#d55e00", "#009e73", "#e69f00"  # colour-blind safe (Okabe and Ito)
FRESH_TO_STALE = ("#d3e5f3", "#1f5f99")
SMOOTHING_STEPS = 9
MOST_BARS = 60
MOST_CHIPS = 9
GENERATION_BOUND, TRAINING_BOUND = 0.3, 0.1  # waiting shares above and below which the verdict is plain
FRACTIONS = "a3po/dN/fraction"
TIMES = ("step_time", "a3po/time/wait")


def plot_run(log_history: History, path: str | Path, title: str | None = None) -> None:
    """Draw a run's `trainer.state.log_history` as a PNG at `path`, whose folder is made.

    The split of time is exact with `logging_steps=1`, or where every optimizer step takes a batch.

    Raises:
        ValueError: nothing that a panel needs was logged.
    """
    path = Path(path)
    figure = run_figure(log_history, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def run_figure(log_history: History, title: str | None = None) -> Figure:
    """The figure that `plot_run` saves. Raises as `plot_run` does."""
    logged = {panel: _logged(log_history, keys) for panel, (keys, _) in PANELS.items()}
    drawn = {panel: entries for panel, (entries, absent) in logged.items() if not absent}
    if not drawn:
        raise ValueError(
            "The log history holds nothing to plot (no entry with a reward, staleness, step time or clip fraction): "
            "train at least one optimizer step, with logging_steps no larger than the number of steps."
        )
    figure = Figure(figsize=(12, 6.8), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)
    aside = [panel for panel in drawn if panel != "Reward"]
    columns = [1.15] * ("Reward" in drawn) + [1.0] * bool(aside)
    grid = figure.add_gridspec(max(1, len(aside)), len(columns), width_ratios=columns)
    limits = _limits(drawn.values())
    for panel, entries in drawn.items():
        axes = figure.add_subplot(grid[:, 0] if panel == "Reward" else grid[aside.index(panel), -1])
        PANELS[panel][1](axes, entries)
        _tidy(axes, limits)
        if panel in ("Reward", aside[-1] if aside else None):
            axes.set_xlabel("optimizer step", color=GREY, fontsize=9)
    if title:
        figure.suptitle(fill(title, 100), x=0.01, ha="left", fontsize=13, color=INK)
    left_out = [f"{panel.lower()} ({', '.join(absent)})" for panel, (_, absent) in logged.items() if absent]
    if left_out:
        figure.supxlabel(f"not logged, so left out: {'; '.join(left_out)}", fontsize=8, color=GREY)
    return figure


def time_split(entries: History) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of waiting, publishing and training of each entry's mean optimizer step, shapes `(entries,)`.

    Starting the engine happens once and belongs to none of them.
    """
    wait, publish = _series(entries, "a3po/time/wait", 0.0), _series(entries, "a3po/time/publish", 0.0)
    start = _series(entries, "a3po/time/engine_start", 0.0) / _steps_covered(entries)
    return wait, publish, np.maximum(_series(entries, "step_time") - start - wait - publish, 0.0)


def waiting_share(log_history: History) -> float:
    """Share of the steps' time in which the trainer waited for rollouts; NaN where no time was logged."""
    entries, absent = _logged(log_history, TIMES)
    if absent:
        return float("nan")
    wait, publish, train = (seconds * _steps_covered(entries) for seconds in time_split(entries))
    return float(wait.sum() / max((wait + publish + train).sum(), 1e-9))


def _draw_reward(axes: Axes, entries: History) -> None:
    steps, reward = _series(entries, "step"), _series(entries, "reward")
    axes.plot(steps, reward, "o", color=BLUE, alpha=_faint(len(steps)), markersize=5, markeredgewidth=0)
    smooth = _smooth(reward)
    axes.plot(steps, smooth, color=BLUE, linewidth=2.5)
    _end_labels(axes, steps[-1], [(f"{smooth[-1]:.2f}", smooth[-1], BLUE)], fontsize=12)
    _name(axes, "Reward", "mean of each batch, and its centred running mean")
    low, high = reward.min(), reward.max()
    margin = 0.06 * (high - low or 1.0)
    axes.set_ylim(low - margin, high + margin)


def _draw_staleness(axes: Axes, entries: History) -> None:
    """Share of the tokens by staleness, fresh at the bottom, and the mean staleness on an axis of its own."""
    values = _staleness_values(entries)
    bins = _bins(entries)
    shares = [_binned(bins, _series(entries, f"a3po/d{d}/fraction", 0.0)) for d in values]
    mean = _binned(bins, _series(entries, "a3po/staleness/mean"))
    left, width = _extents(entries, bins)
    middle = left + width / 2
    # Half a step on at both ends, so that a single step has an area too.
    around = np.concatenate([left[:1], middle, left[-1:] + width[-1:]])
    colours = _ramp(len(values))
    axes.stackplot(around, [np.pad(share, 1, mode="edge") for share in shares], colors=colours, linewidth=0)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))

    halo = [withStroke(linewidth=3.5, foreground="white")]
    means = axes.twinx()
    means.set_ylim(0, values[-1] + 0.5)
    means.plot(middle, mean, color=INK, linewidth=1.6, path_effects=halo, **_dots(len(mean)))
    means.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4, prune="lower"))
    means.tick_params(colors=GREY, labelsize=9, length=0)
    means.spines[:].set_visible(False)
    under_label = mean[-max(1, len(mean) // 4) :]
    above = under_label.max() < 0.7 * means.get_ylim()[1]
    edge = under_label.max() if above else under_label.min()
    means.annotate(
        f"mean {mean[-1]:.1f}", (middle[-1], edge), xytext=(0, 6 if above else -6), textcoords="offset points",
        ha="right", va="bottom" if above else "top", color=INK, fontsize=9, fontweight="bold", path_effects=halo,
    )  # fmt: skip
    shown = range(len(values))
    if len(values) > MOST_CHIPS:
        shown = sorted({round(at) for at in np.linspace(0, len(values) - 1, MOST_CHIPS)})
    chips = [(f"{values[i]}", INK if i < len(values) / 2 else "white", colours[i]) for i in shown]
    _name(axes, "Staleness", "tokens by optimizer steps behind; line: mean (right)", chips)


def _draw_time(axes: Axes, entries: History) -> None:
    bins = _bins(entries)
    wait, publish, train = (_binned(bins, seconds) for seconds in time_split(entries))
    left, width = _extents(entries, bins)
    base = np.zeros(len(bins))
    for part, colour in ((train, BLUE), (publish, GREEN), (wait, ORANGE)):
        axes.bar(left + 0.07 * width, part, 0.86 * width, bottom=base, color=colour, linewidth=0, align="edge")
        base = base + part
    tallest, usual = int(base.argmax()), float(np.median(base))
    top = min(base[tallest] * 1.05, 3 * usual) or 1.0
    axes.set_ylim(0, top)
    if base[tallest] > top:  # one slow step should not hide the others, and is said where it leaves the page
        axes.annotate(
            f"{base[tallest]:.0f} s", (left[tallest] + width[tallest], top), xytext=(3, -1),
            textcoords="offset points", va="top", color=INK, fontsize=8,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip
    words = [("training", BLUE, None), ("publishing", GREEN, None), ("waiting", ORANGE, None)]
    _name(axes, "Seconds a step", _verdict(waiting_share(entries)), words, detail_colour=INK)


def _draw_trust_region(axes: Axes, entries: History) -> None:
    steps = _series(entries, "step")
    labels = []
    for name, key, colour in (("ESS", "ess", BLUE), ("high", "clip/high", ORANGE), ("low", "clip/low", AMBER)):
        values = _series(entries, f"a3po/{key}")
        if len(steps) > MOST_BARS:
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
            values = _smooth(values)
        axes.plot(steps, values, color=colour, linewidth=1.8, **_dots(len(steps)))
        labels.append((f"{name} {values[-1]:.1%}", values[-1], colour))
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _end_labels(axes, steps[-1], labels, fontsize=9)
    detail = "effective sample size (ESS), tokens clipped high and low"
    if len(steps) > MOST_BARS:
        detail += "; centred running means"
    weights, largest = _series(entries, "a3po/w/max"), []
    if not np.isnan(weights).all():
        at = int(np.nanargmax(weights))
        largest = [(f"max w {weights[at]:.3g} at step {steps[at]:.0f}", GREY, None)]
    _name(axes, "Trust region", detail, largest)


PANELS: dict[str, tuple[tuple[str, ...], Callable[[Axes, History], None]]] = {
    "Reward": (("reward",), _draw_reward),
    "Staleness": (("a3po/staleness/mean", FRACTIONS), _draw_staleness),
    "Seconds a step": (TIMES, _draw_time),
    "Trust region": (("a3po/ess", "a3po/clip/low", "a3po/clip/high"), _draw_trust_region),
}


def _logged(history: History, keys: tuple[str, ...]) -> tuple[History, list[str]]:
    """The entries that hold a panel's numbers, and those of its keys that no entry holds.

    Waiting is logged only where a batch is taken, so it does not decide which entries count.
    """
    absent = [key for key in keys if not any(_holds(entry, key) for entry in history)]
    decisive = [key for key in keys if key != "a3po/time/wait"]
    entries = [entry for entry in history if "step" in entry and all(_holds(entry, key) for key in decisive)]
    return entries, absent or ([] if entries else list(keys))


def _holds(entry: dict[str, Any], key: str) -> bool:
    if key == FRACTIONS:
        return bool(_staleness_values([entry]))
    return entry.get(key) is not None and bool(np.isfinite(entry[key]))


def _staleness_values(entries: History) -> list[int]:
    keys = {key for entry in entries for key in entry if key.startswith("a3po/d") and key.endswith("/fraction")}
    return sorted(int(key.split("/")[1][1:]) for key in keys)


def _verdict(share: float) -> str:
    bound = "balanced"
    if share > GENERATION_BOUND:
        bound = "generation-bound"
    elif share < TRAINING_BOUND:
        bound = "training-bound"
    return f"the trainer waited {share:.0%} of the time: {bound}"


def _series(entries: History, key: str, missing: float = np.nan) -> np.ndarray:
    values = [entry.get(key) for entry in entries]
    return np.array([missing if value is None else value for value in values], dtype=float)


def _spacing(entries: History) -> float:
    """Optimizer steps between two entries."""
    return float(np.median(np.diff(_series(entries, "step")))) if len(entries) > 1 else 1.0


def _steps_covered(entries: History) -> np.ndarray:
    """How many optimizer steps each entry is the mean of."""
    steps = _series(entries, "step")
    first = min(steps[0], steps[1] - steps[0]) if len(steps) > 1 else steps[0]
    return np.maximum(np.diff(steps, prepend=steps[0] - first), 1.0)


def _bins(entries: History) -> list[np.ndarray]:
    """Neighbouring entries that share a bar, equally many in all bars but the last."""
    size = -(-len(entries) // MOST_BARS)
    return [np.arange(at, min(at + size, len(entries))) for at in range(0, len(entries), size)]


def _binned(bins: list[np.ndarray], values: np.ndarray) -> np.ndarray:
    return np.array([values[inside].mean() for inside in bins])


def _extents(entries: History, bins: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Left edge and width of each bar."""
    steps, spacing = _series(entries, "step"), _spacing(entries)
    left = np.array([steps[inside[0]] for inside in bins]) - spacing / 2
    return left, np.array([steps[inside[-1]] - steps[inside[0]] for inside in bins]) + spacing


def _limits(histories: Any) -> tuple[float, float]:
    """The steps that every panel shows."""
    first = min(entries[0]["step"] for entries in histories)
    last = max(entries[-1]["step"] for entries in histories)
    margin = max(0.7 * max(_spacing(entries) for entries in histories), 0.012 * (last - first))
    return first - margin, last + margin


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred running mean; the window shrinks at both ends."""
    half = min(max(SMOOTHING_STEPS, len(values) // 30), len(values)) // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _faint(count: int) -> float:
    """Opacity of points that are drawn under their mean."""
    return 0.9 if count <= 5 else max(0.15, 0.35 - count / 2000)


def _dots(count: int) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4} if count < 5 else {}


def _ramp(count: int) -> list[str]:
    """Colours from fresh to stale."""
    ends = [np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in FRESH_TO_STALE]
    mixed = [ends[0] + (ends[1] - ends[0]) * t for t in np.linspace(0, 1, max(count, 2))[:count]]
    return ["#" + "".join(f"{round(c):02x}" for c in colour) for colour in mixed]


def _end_labels(axes: Axes, x: float, labels: list[tuple[str, float, str]], fontsize: int) -> None:
    """Each line's word at its last point; where two would overlap, moved apart within the axes."""
    bottom, top = axes.get_ylim()
    gap = 0.13 * (top - bottom)
    lowest, places = -np.inf, []
    for word, y, colour in sorted(labels, key=lambda label: label[1]):
        lowest = max(y, lowest + gap)
        places.append((word, lowest, colour))
    highest = max(top, bottom + (len(places) - 1) * gap)
    for word, y, colour in reversed(places):
        y = min(y, highest)
        highest = y - gap
        axes.annotate(
            word, (x, y), xytext=(7, 0), textcoords="offset points", va="center", color=colour,
            fontsize=fontsize, fontweight="bold", annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip


def _name(
    axes: Axes,
    name: str,
    detail: str,
    words: list[tuple[str, str, str | None]] | None = None,
    detail_colour: str = GREY,
) -> None:
    """Title and detail above the axes; at the right words in their colours, on a ground where they have one."""
    axes.set_title(name, loc="left", fontsize=11, fontweight="bold", color=INK, pad=22)
    offset = {"textcoords": "offset points", "annotation_clip": False, "fontsize": 9}
    axes.annotate(detail, (0, 1), xycoords="axes fraction", xytext=(0, 8), color=detail_colour, **offset)
    place = {"xy": (1, 1), "xycoords": "axes fraction", "xytext": (-3, 25)}
    for word, colour, ground in reversed(words or []):
        box = {"boxstyle": "square,pad=0.3", "facecolor": ground, "edgecolor": "none"} if ground else None
        text = axes.annotate(word, ha="right", color=colour, fontweight="bold", bbox=box, **place, **offset)
        place = {"xy": (0, 1), "xycoords": (text, "axes fraction"), "xytext": (-8 if ground else -12, 25)}


def _tidy(axes: Axes, limits: tuple[float, float]) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set_xlim(limits)
