"""The panels of one run: reward, staleness, where the time went, and how far the policy moved.

Guarantees: a panel draws the entries that it is given; each entry holds all values that the panel needs (`PANELS`).
"""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from trl_a3po.report.chart_style import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    ColouredWord,
    markers_if_few,
    point_opacity,
    staleness_colours,
    write_end_labels,
    write_title,
)
from trl_a3po.report.history_arrays import (
    FRACTIONS,
    MAX_BARS,
    TIMES,
    History,
    bar_extents,
    bar_means,
    bars_of,
    running_mean,
    series,
    staleness_values,
    time_split,
    waiting_share,
)

MAX_LEGEND_VALUES = 9
# Shares of waiting above which a run is generation-bound, and below which it is training-bound.
GENERATION_BOUND, TRAINING_BOUND = 0.3, 0.1


def draw_reward(axes: Axes, entries: History) -> None:
    steps, reward = series(entries, "step"), series(entries, "reward")
    axes.plot(steps, reward, "o", color=BLUE, alpha=point_opacity(len(steps)), markersize=5, markeredgewidth=0)
    smooth = running_mean(reward)
    axes.plot(steps, smooth, color=BLUE, linewidth=2.5)
    write_end_labels(axes, steps[-1], [(f"{smooth[-1]:.2f}", smooth[-1], BLUE)], fontsize=12)
    write_title(axes, "Reward", "mean of each batch, and its centred running mean")
    low, high = reward.min(), reward.max()
    margin = 0.06 * (high - low or 1.0)
    axes.set_ylim(low - margin, high + margin)


def draw_staleness(axes: Axes, entries: History) -> None:
    """Share of the tokens by staleness, fresh tokens at the bottom, and the mean staleness on a second axis."""
    values = staleness_values(entries)
    bars = bars_of(entries)
    shares = [bar_means(bars, series(entries, f"a3po/d{d}/fraction", 0.0)) for d in values]
    mean = bar_means(bars, series(entries, "a3po/staleness/mean"))
    left, width = bar_extents(entries, bars)
    middle = left + width / 2
    # Half a step further at both ends, so that a single step has an area too.
    around = np.concatenate([left[:1], middle, left[-1:] + width[-1:]])
    colours = staleness_colours(len(values))
    axes.stackplot(around, [np.pad(share, 1, mode="edge") for share in shares], colors=colours, linewidth=0)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))

    halo = [withStroke(linewidth=3.5, foreground="white")]
    means = axes.twinx()
    means.set_ylim(0, values[-1] + 0.5)
    means.plot(middle, mean, color=INK, linewidth=1.6, path_effects=halo, **markers_if_few(len(mean)))
    means.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    means.tick_params(colors=GREY, labelsize=9, length=0)
    means.spines[:].set_visible(False)
    under_label = mean[-max(1, len(mean) // 4) :]
    above = under_label.max() < 0.7 * means.get_ylim()[1]
    edge = under_label.max() if above else under_label.min()
    means.annotate(
        f"mean {mean[-1]:.1f}", (middle[-1], edge), xytext=(0, 6 if above else -6), textcoords="offset points",
        ha="right", va="bottom" if above else "top", color=INK, fontsize=9, fontweight="bold", path_effects=halo,
    )  # fmt: skip
    shown = list(range(len(values)))
    if len(values) > MAX_LEGEND_VALUES:
        shown = sorted({round(at) for at in np.linspace(0, len(values) - 1, MAX_LEGEND_VALUES)})
    legend: list[ColouredWord] = [(f"{values[i]}", INK if i < len(values) / 2 else "white", colours[i]) for i in shown]
    write_title(axes, "Staleness", "tokens by optimizer steps behind; line: mean (right)", legend)


def draw_time(axes: Axes, entries: History) -> None:
    bars = bars_of(entries)
    wait, publish, train = (bar_means(bars, seconds) for seconds in time_split(entries))
    left, width = bar_extents(entries, bars)
    base = np.zeros(len(bars))
    for part, colour in ((train, BLUE), (publish, GREEN), (wait, ORANGE)):
        axes.bar(left + 0.07 * width, part, 0.86 * width, bottom=base, color=colour, linewidth=0, align="edge")
        base = base + part
    tallest, usual = int(base.argmax()), float(np.median(base))
    top = min(base[tallest] * 1.05, 3 * usual) or 1.0
    axes.set_ylim(0, top)
    if base[tallest] > top:  # one slow step should not hide the others: its bar is cut, and labelled where it is cut
        axes.annotate(
            f"{base[tallest]:.0f} s", (left[tallest] + width[tallest], top), xytext=(3, -1),
            textcoords="offset points", va="top", color=INK, fontsize=8,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip
    words: list[ColouredWord] = [("training", BLUE, None), ("publishing", GREEN, None), ("waiting", ORANGE, None)]
    write_title(axes, "Seconds a step", _bound(waiting_share(entries)), words, detail_colour=INK)


def draw_trust_region(axes: Axes, entries: History) -> None:
    steps = series(entries, "step")
    labels = []
    for name, key, colour in (("ESS", "ess", BLUE), ("high", "clip/high", ORANGE), ("low", "clip/low", AMBER)):
        values = series(entries, f"a3po/{key}")
        if len(steps) > MAX_BARS:
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
            values = running_mean(values)
        axes.plot(steps, values, color=colour, linewidth=1.8, **markers_if_few(len(steps)))
        labels.append((f"{name} {values[-1]:.1%}", values[-1], colour))
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    write_end_labels(axes, steps[-1], labels, fontsize=9)
    detail = "effective sample size (ESS), tokens clipped high and low"
    if len(steps) > MAX_BARS:
        detail += "; centred running means"
    weights = series(entries, "a3po/w/max")
    largest: list[ColouredWord] = []
    if not np.isnan(weights).all() and np.nanmax(weights) > 1:
        at = int(np.nanargmax(weights))
        largest = [(f"max w {weights[at]:.3g} at step {steps[at]:.0f}", GREY, None)]
    write_title(axes, "Trust region", detail, largest)


def _bound(share: float) -> str:
    bound = "balanced"
    if share > GENERATION_BOUND:
        bound = "generation-bound"
    elif share < TRAINING_BOUND:
        bound = "training-bound"
    return f"the trainer waited {share:.0%} of the time: {bound}"


PANELS: dict[str, tuple[tuple[str, ...], Callable[[Axes, History], None]]] = {
    "Reward": (("reward",), draw_reward),
    "Staleness": (("a3po/staleness/mean", FRACTIONS), draw_staleness),
    "Seconds a step": (TIMES, draw_time),
    "Trust region": (("a3po/ess", "a3po/clip/low", "a3po/clip/high"), draw_trust_region),
}
