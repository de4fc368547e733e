"""The panels of one run: reward, staleness, where the time went, and how far the policy moved.

Guarantees: a panel draws the entries it is given, which hold all of its numbers (`PANELS`).
"""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from trl_a3po.report.chart_style import AMBER, BLUE, GREEN, GREY, INK, ORANGE, dots, end_labels, faint, name_axes, ramp
from trl_a3po.report.history_arrays import (
    FRACTIONS,
    MOST_BARS,
    TIMES,
    History,
    binned,
    bins_of,
    extents,
    running_mean,
    series,
    staleness_values,
    time_split,
    waiting_share,
)

MOST_CHIPS = 9
GENERATION_BOUND, TRAINING_BOUND = 0.3, 0.1  # waiting shares above and below which the verdict is plain


def draw_reward(axes: Axes, entries: History) -> None:
    steps, reward = series(entries, "step"), series(entries, "reward")
    axes.plot(steps, reward, "o", color=BLUE, alpha=faint(len(steps)), markersize=5, markeredgewidth=0)
    smooth = running_mean(reward)
    axes.plot(steps, smooth, color=BLUE, linewidth=2.5)
    end_labels(axes, steps[-1], [(f"{smooth[-1]:.2f}", smooth[-1], BLUE)], fontsize=12)
    name_axes(axes, "Reward", "mean of each batch, and its centred running mean")
    low, high = reward.min(), reward.max()
    margin = 0.06 * (high - low or 1.0)
    axes.set_ylim(low - margin, high + margin)


def draw_staleness(axes: Axes, entries: History) -> None:
    """Share of the tokens by staleness, fresh at the bottom, and the mean staleness on an axis of its own."""
    values = staleness_values(entries)
    bins = bins_of(entries)
    shares = [binned(bins, series(entries, f"a3po/d{d}/fraction", 0.0)) for d in values]
    mean = binned(bins, series(entries, "a3po/staleness/mean"))
    left, width = extents(entries, bins)
    middle = left + width / 2
    # Half a step on at both ends, so that a single step has an area too.
    around = np.concatenate([left[:1], middle, left[-1:] + width[-1:]])
    colours = ramp(len(values))
    axes.stackplot(around, [np.pad(share, 1, mode="edge") for share in shares], colors=colours, linewidth=0)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))

    halo = [withStroke(linewidth=3.5, foreground="white")]
    means = axes.twinx()
    means.set_ylim(0, values[-1] + 0.5)
    means.plot(middle, mean, color=INK, linewidth=1.6, path_effects=halo, **dots(len(mean)))
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
    shown = range(len(values))
    if len(values) > MOST_CHIPS:
        shown = sorted({round(at) for at in np.linspace(0, len(values) - 1, MOST_CHIPS)})
    chips = [(f"{values[i]}", INK if i < len(values) / 2 else "white", colours[i]) for i in shown]
    name_axes(axes, "Staleness", "tokens by optimizer steps behind; line: mean (right)", chips)


def draw_time(axes: Axes, entries: History) -> None:
    bins = bins_of(entries)
    wait, publish, train = (binned(bins, seconds) for seconds in time_split(entries))
    left, width = extents(entries, bins)
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
    name_axes(axes, "Seconds a step", _verdict(waiting_share(entries)), words, detail_colour=INK)


def draw_trust_region(axes: Axes, entries: History) -> None:
    steps = series(entries, "step")
    labels = []
    for name, key, colour in (("ESS", "ess", BLUE), ("high", "clip/high", ORANGE), ("low", "clip/low", AMBER)):
        values = series(entries, f"a3po/{key}")
        if len(steps) > MOST_BARS:
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
            values = running_mean(values)
        axes.plot(steps, values, color=colour, linewidth=1.8, **dots(len(steps)))
        labels.append((f"{name} {values[-1]:.1%}", values[-1], colour))
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    end_labels(axes, steps[-1], labels, fontsize=9)
    detail = "effective sample size (ESS), tokens clipped high and low"
    if len(steps) > MOST_BARS:
        detail += "; centred running means"
    weights, largest = series(entries, "a3po/w/max"), []
    if not np.isnan(weights).all() and np.nanmax(weights) > 1:
        at = int(np.nanargmax(weights))
        largest = [(f"max w {weights[at]:.3g} at step {steps[at]:.0f}", GREY, None)]
    name_axes(axes, "Trust region", detail, largest)


def _verdict(share: float) -> str:
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
