"""The end of a run's timeline as a picture: what the trainer did, and above it each group, from submission to take.

Guarantees: bars are where the timeline's lines say; groups that overlap in time never share a row.
"""

from typing import Any

from matplotlib.axes import Axes

from trl_a3po.report.chart_style import AMBER, BLUE, GREEN, GREY, ORANGE, RULE, VIOLET

Lines = list[dict[str, Any]]

TAKES_SHOWN = 10
PALE_AMBER, DARK = "#f3d38c", "#444444"
PHASES = (  # from, to, what, colour
    ("submitted", "finished", "sampling", BLUE),
    ("finished", "scoring", "in line", PALE_AMBER),
    ("scoring", "scored", "rewards", AMBER),
    ("scored", "ended", "ready", RULE),
)
DOING = (
    ("step", "training", DARK),
    ("publish", "publishing", GREEN),
    ("take", "waiting", ORANGE),
    ("evaluation", "evaluation", VIOLET),
    ("engine_start", "engine start", GREY),
)
LEAST_HEIGHT, MOST_ROWS = 1.8, 8  # of the trainer's bar: in rows of groups, and as a share of them
LEGEND = [(what, colour) for *_, what, colour in PHASES] + [(what, colour) for _, what, colour in DOING]


def draw_gantt(axes: Axes, lines: Lines, takes: int = TAKES_SHOWN) -> int:
    """Draw the last `takes` takes of a timeline, in seconds since the first of them began. Returns how many it drew.

    Args:
        lines: of `read_timeline`.
    """
    shown = [line for line in lines if line["kind"] == "take"][-takes:]
    if not shown:
        return 0
    ends = [line["ended"] for line in lines if line["kind"] in ("take", "step")]
    start, end = shown[0]["began"], max(ends)
    groups = [line for line in lines if line["kind"] == "group" and line["submitted"] and line["ended"] > start]
    rows = rows_of([(group["submitted"], group["ended"]) for group in groups])
    for group, row in zip(groups, rows, strict=True):
        for since, until, _, colour in PHASES:
            if group[since] is not None:
                stop = group["ended"] if group[until] is None else group[until]
                axes.barh(row, stop - group[since], 0.8, left=group[since] - start, color=colour, linewidth=0)
    number = max(rows, default=-1) + 1
    height = max(LEAST_HEIGHT, number / MOST_ROWS)
    below = -0.9 - height / 2
    for kind, _, colour in DOING:
        for line in (line for line in lines if line["kind"] == kind and line["ended"] > start):
            axes.barh(
                below, line["ended"] - line["began"], height, left=line["began"] - start, color=colour, linewidth=0
            )
    for take in shown:
        axes.axvline(take["ended"] - start, color=GREY, linewidth=0.5, zorder=0)
    axes.set_xlim(0, end - start)
    axes.set_ylim(below - height / 2, number - 0.4)
    axes.set_yticks([below, (number - 1) / 2], ["trainer", "groups"])
    return len(shown)


def rows_of(spans: list[tuple[float, float]]) -> list[int]:
    """The lowest row that is free at each span's beginning, as spans begin."""
    rows, free_at = [0] * len(spans), []
    for i in sorted(range(len(spans)), key=lambda i: spans[i][0]):
        began, ended = spans[i]
        row = next((row for row, free in enumerate(free_at) if free <= began), len(free_at))
        free_at[row : row + 1] = [ended]
        rows[i] = row
    return rows
