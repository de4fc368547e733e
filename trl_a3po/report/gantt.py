"""The last part of a run's timeline as a Gantt chart: what the trainer did, and each group from submission to take.

Guarantees: bars are where the lines of the timeline place them; groups that overlap in time are never in one row.
"""

from typing import Any

from matplotlib.axes import Axes

from trl_a3po.report.chart_style import AMBER, BLUE, GREEN, GREY, ORANGE, RULE, VIOLET

Lines = list[dict[str, Any]]

TAKES_SHOWN = 10
PALE_AMBER, DARK = "#f3d38c", "#444444"
PHASES = (  # of a group: from, to, name, colour
    ("submitted", "finished", "sampling", BLUE),
    ("finished", "scoring", "in line", PALE_AMBER),
    ("scoring", "scored", "rewards", AMBER),
    ("scored", "ended", "ready", RULE),
)
ACTIVITIES = (  # of the trainer: kind of line, name, colour
    ("step", "training", DARK),
    ("publish", "publishing", GREEN),
    ("take", "waiting", ORANGE),
    ("evaluation", "evaluation", VIOLET),
    ("engine_start", "engine start", GREY),
)
LEGEND = [(name, colour) for *_, name, colour in PHASES] + [(name, colour) for _, name, colour in ACTIVITIES]
# Height of the trainer's bar, in rows of groups: at least this, and one row for so many rows of groups.
MIN_TRAINER_HEIGHT, ROWS_PER_TRAINER_HEIGHT = 1.8, 8


def draw_gantt(axes: Axes, lines: Lines, takes: int = TAKES_SHOWN) -> int:
    """Draw the last `takes` takes of a timeline, in seconds since the first of them began. Returns how many were
    drawn.

    Args:
        lines: as `read_timeline` returns them.
    """
    shown = [line for line in lines if line["kind"] == "take"][-takes:]
    if not shown:
        return 0
    start = shown[0]["began"]
    end = max(line["ended"] for line in lines if line["kind"] in ("take", "step"))
    num_rows = _draw_groups(axes, lines, start)
    height = max(MIN_TRAINER_HEIGHT, num_rows / ROWS_PER_TRAINER_HEIGHT)
    middle = -0.9 - height / 2
    _draw_trainer(axes, lines, start, middle, height)
    for take in shown:
        axes.axvline(take["ended"] - start, color=GREY, linewidth=0.5, zorder=0)
    axes.set_xlim(0, end - start)
    axes.set_ylim(middle - height / 2, num_rows - 0.4)
    axes.set_yticks([middle, (num_rows - 1) / 2], ["trainer", "groups"])
    return len(shown)


def _draw_groups(axes: Axes, lines: Lines, start: float) -> int:
    """Draw the phases of the groups that ended after `start`. Returns the number of rows they take."""
    groups = [line for line in lines if line["kind"] == "group" and line["submitted"] and line["ended"] > start]
    rows = rows_of([(group["submitted"], group["ended"]) for group in groups])
    for group, row in zip(groups, rows, strict=True):
        for since, until, _, colour in PHASES:
            if group[since] is None:
                continue
            stop = group["ended"] if group[until] is None else group[until]
            axes.barh(row, stop - group[since], 0.8, left=group[since] - start, color=colour, linewidth=0)
    return max(rows, default=-1) + 1


def _draw_trainer(axes: Axes, lines: Lines, start: float, middle: float, height: float) -> None:
    for kind, _, colour in ACTIVITIES:
        spans = [(line["began"], line["ended"]) for line in lines if line["kind"] == kind and line["ended"] > start]
        for began, ended in spans:
            axes.barh(middle, ended - began, height, left=began - start, color=colour, linewidth=0)


def rows_of(spans: list[tuple[float, float]]) -> list[int]:
    """For each span, the lowest row that is free when the span begins."""
    rows: list[int] = [0] * len(spans)
    free_at: list[float] = []
    for i in sorted(range(len(spans)), key=lambda i: spans[i][0]):
        began, ended = spans[i]
        row = next((row for row, free in enumerate(free_at) if free <= began), len(free_at))
        free_at[row : row + 1] = [ended]
        rows[i] = row
    return rows
