"""A run on one page: reward, staleness, where the time went, and how far the policy moved.

Guarantees: draws only what was logged; a panel whose values are missing is left out, and the page says so.
"""

from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure

from trl_a3po.report.chart_style import GREY, INK, image_path, padded_layout, style_step_axes
from trl_a3po.report.history_arrays import History, entries_with, step_limits, time_split, waiting_share
from trl_a3po.report.panels import PANELS

__all__ = ["plot_run", "run_figure", "time_split", "waiting_share"]


def plot_run(log_history: History, path: str | Path, title: str | None = None) -> None:
    """Draw what a run logged, as `read_history` returns it, and save the image as `path`, whose folder is created.

    The split of the time is exact with `logging_steps=1`, or where every optimizer step takes a batch.

    Raises:
        ValueError: nothing that a panel needs was logged, or `path` is a folder.
    """
    path = image_path(path)
    figure = run_figure(log_history, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def run_figure(log_history: History, title: str | None = None) -> Figure:
    """The figure that `plot_run` saves. Raises as `plot_run` does."""
    found = {panel: entries_with(log_history, keys) for panel, (keys, _) in PANELS.items()}
    drawn = {panel: entries for panel, (entries, absent) in found.items() if not absent}
    if not drawn:
        raise ValueError(
            "The log history holds nothing to plot (no entry with a reward, staleness, step time or clip fraction): "
            "train at least one optimizer step, with logging_steps no larger than the number of steps."
        )
    layout = padded_layout(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=(12, 6.8), layout=layout, facecolor="white")
    _draw_panels(figure, drawn)
    if title:
        figure.suptitle(fill(title, 100), x=0.01, ha="left", fontsize=13, color=INK)
    left_out = [f"{panel.lower()} ({', '.join(absent)})" for panel, (_, absent) in found.items() if absent]
    if left_out:
        figure.supxlabel(f"not logged, so left out: {'; '.join(left_out)}", fontsize=8, color=GREY)
    return figure


def _draw_panels(figure: Figure, drawn: dict[str, History]) -> None:
    """The reward in a column on the left, the other panels below each other on the right."""
    right = [panel for panel in drawn if panel != "Reward"]
    widths = [1.15] * ("Reward" in drawn) + [1.0] * bool(right)
    grid = figure.add_gridspec(max(1, len(right)), len(widths), width_ratios=widths)
    limits = step_limits(drawn.values())
    for panel, entries in drawn.items():
        axes = figure.add_subplot(grid[:, 0] if panel == "Reward" else grid[right.index(panel), -1])
        _, draw = PANELS[panel]
        draw(axes, entries)
        style_step_axes(axes, limits)
        if panel == "Reward" or panel == right[-1]:
            axes.set_xlabel("optimizer step", color=GREY, fontsize=9)
