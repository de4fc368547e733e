"""How a chart looks: colours, titles, labels at the ends of lines, axes without what says nothing."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

INK, GREY, RULE = "#222222", "#777777", "#dddddd"
BLUE, ORANGE, GREEN, AMBER, VIOLET = "#0072b2", "#d55e00", "#009e73", "#e69f00", "#aa77aa"  # told apart by all eyes
FRESH_TO_STALE = ("#d3e5f3", "#1f5f99")


def image_path(path: str | Path) -> Path:
    """The file that a picture is saved as: `path`, with `.png` where it has no suffix.

    Raises:
        ValueError: it is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder: name the file that the picture is saved as, for example {path}/runs.png."
        )
    return path if path.suffix else path.with_name(f"{path.name}.png")


def name_axes(
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


def end_labels(axes: Axes, x: float, labels: list[tuple[str, float, str]], fontsize: int) -> None:
    """Each line's word at its last point; where two would overlap, moved apart within the axes; the same word once."""
    bottom, top = axes.get_ylim()
    gap = 0.13 * (top - bottom)
    labels = _merged(labels, gap)
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


def _merged(labels: list[tuple[str, float, str]], gap: float) -> list[tuple[str, float, str]]:
    """Neighbours of the same word as one, in the colour of text."""
    kept: list[tuple[str, float, str]] = []
    for word, y, colour in sorted(labels, key=lambda label: label[1]):
        if kept and kept[-1][0] == word and y - kept[-1][1] < gap:
            kept[-1] = (word, y, INK)
        else:
            kept.append((word, y, colour))
    return kept


def tidy_axes(axes: Axes, limits: tuple[float, float]) -> None:
    """No frame, a faint grid, whole optimizer steps from one of `limits` to the other."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set_xlim(limits)


def faint(count: int) -> float:
    """Opacity of points that are drawn under their mean."""
    return 0.9 if count <= 5 else max(0.15, 0.35 - count / 2000)


def dots(count: int) -> dict[str, Any]:
    """Marks on a line of few points, which would be hard to see without."""
    return {"marker": "o", "markersize": 4} if count < 5 else {}


def ramp(count: int) -> list[str]:
    """Colours from fresh to stale."""
    ends = [np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in FRESH_TO_STALE]
    mixed = [ends[0] + (ends[1] - ends[0]) * t for t in np.linspace(0, 1, max(count, 2))[:count]]
    return ["#" + "".join(f"{round(c):02x}" for c in colour) for colour in mixed]
