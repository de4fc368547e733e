"""The look that all charts share: colours, titles, labels at the ends of lines, bare axes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

INK, GREY, RULE = "#222222", "#777777", "#dddddd"
# Distinguishable with all kinds of colour vision.
BLUE, ORANGE, GREEN, AMBER, VIOLET = "#0072b2", "#d55e00", "#009e73", "#e69f00", "#aa77aa"
FRESH_TO_STALE = ("#d3e5f3", "#1f5f99")

ColouredWord = tuple[str, str, str | None]  # text, colour, background
EndLabel = tuple[str, float, str]  # text, height, colour


def image_path(path: str | Path) -> Path:
    """The file that an image is saved as: `path`, with `.png` where it has no suffix.

    Raises:
        ValueError: `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name the file to save the image as, for example {path}/runs.png.")
    return path if path.suffix else path.with_name(f"{path.name}.png")


def padded_layout(*, w_pad: float, h_pad: float, wspace: float, hspace: float) -> ConstrainedLayoutEngine:
    """The layout engine of a figure with these paddings, in inches, and spaces, as parts of a subplot."""
    return ConstrainedLayoutEngine(w_pad=w_pad, h_pad=h_pad, wspace=wspace, hspace=hspace)


def write_title(
    axes: Axes, title: str, detail: str, words: Sequence[ColouredWord] = (), detail_colour: str = GREY
) -> None:
    """Write title and detail above the axes, and `words` to the right of the title."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=22)
    style: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "fontsize": 9}
    axes.annotate(detail, (0, 1), xycoords="axes fraction", xytext=(0, 8), color=detail_colour, **style)
    place: dict[str, Any] = {"xy": (1, 1), "xycoords": "axes fraction", "xytext": (-3, 25)}
    for word, colour, background in reversed(words):
        box = {"boxstyle": "square,pad=0.3", "facecolor": background, "edgecolor": "none"} if background else None
        text = axes.annotate(word, ha="right", color=colour, fontweight="bold", bbox=box, **place, **style)
        place = {"xy": (0, 1), "xycoords": (text, "axes fraction"), "xytext": (-8 if background else -12, 25)}


def write_end_labels(axes: Axes, x: float, labels: list[EndLabel], fontsize: int) -> None:
    """Write the label of each line at its last point. Labels that would overlap are moved apart within the axes, and
    equal ones are merged."""
    bottom, top = axes.get_ylim()
    gap = 0.13 * (top - bottom)
    labels = _merge_equal_neighbours(labels, gap)
    lowest = -np.inf
    placed: list[EndLabel] = []
    for word, y, colour in sorted(labels, key=lambda label: label[1]):
        lowest = max(y, lowest + gap)
        placed.append((word, lowest, colour))
    highest = max(top, bottom + (len(placed) - 1) * gap)
    for word, y, colour in reversed(placed):
        y = min(y, highest)
        highest = y - gap
        axes.annotate(
            word, (x, y), xytext=(7, 0), textcoords="offset points", va="center", color=colour,
            fontsize=fontsize, fontweight="bold", annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip


def _merge_equal_neighbours(labels: list[EndLabel], gap: float) -> list[EndLabel]:
    """Labels of the same text less than `gap` apart become one, in the colour of text."""
    kept: list[EndLabel] = []
    for word, y, colour in sorted(labels, key=lambda label: label[1]):
        if kept and kept[-1][0] == word and y - kept[-1][1] < gap:
            kept[-1] = (word, y, INK)
        else:
            kept.append((word, y, colour))
    return kept


def style_step_axes(axes: Axes, limits: tuple[float, float]) -> None:
    """No frame but a faint grid, and an x axis of whole optimizer steps between the two `limits`."""
    remove_frame(axes)
    axes.spines["bottom"].set_color(RULE)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.set_xlim(limits)


def remove_frame(axes: Axes) -> None:
    """Remove all sides of the frame but the bottom, and the marks of the ticks."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=GREY, labelsize=9, length=0)


def point_opacity(count: int) -> float:
    """Opacity of `count` points that are drawn under their running mean."""
    return 0.9 if count <= 5 else max(0.15, 0.35 - count / 2000)


def markers_if_few(count: int) -> dict[str, Any]:
    """Markers for a line of few points, which would be hard to see without."""
    return {"marker": "o", "markersize": 4} if count < 5 else {}


def staleness_colours(count: int) -> list[str]:
    """`count` colours from fresh to stale."""
    fresh, stale = (np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) for colour in FRESH_TO_STALE)
    mixed = [fresh + (stale - fresh) * t for t in np.linspace(0, 1, max(count, 2))[:count]]
    return ["#" + "".join(f"{round(channel):02x}" for channel in colour) for colour in mixed]
