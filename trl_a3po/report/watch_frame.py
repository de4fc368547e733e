"""A frame of `trl-a3po watch`, as text of rich.

Guarantees: pure; fits into 24 lines of 60 columns; without colours nothing is lost; without Unicode it is ASCII.
"""

import math

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trl_a3po.report.run_process import how_it_was_left
from trl_a3po.report.watch_view import SlowGroup, WatchView
from trl_a3po.rollout.left_out import reasons_in_words

LABELS = 11  # columns
TICKS = "▁▂▃▄▅▆▇█"
SILENT = 60.0  # seconds without a line, after which a run is said to be silent
COLOURS = {"training": "blue", "waiting": "dark_orange", "publishing": "green"}
LIMIT_COLOURS = {"balanced": "green", "training": "blue"}
"""Colours of the verdicts in which the trainer does not wait."""


def watch_frame(
    view: WatchView, name: str, now: float, width: int, *, ascii_only: bool = False, gone: bool = False
) -> RenderableType:
    """One frame.

    Args:
        view: what is shown.
        name: of the run.
        now: seconds since 1970.
        width: columns that there are.
        ascii_only: the terminal shows ASCII only.
        gone: the process that trained is not there any more, and has not written that the run ended.
    """
    rows = Table.grid(padding=(0, 1, 0, 0))
    rows.add_column(width=LABELS, style="bold")
    rows.add_column()
    room = width - LABELS - 2
    for label, text in (
        ("progress", _progress(view, room, ascii_only)),
        ("reward", _reward(view, room, ascii_only)),
        ("staleness", _staleness(view, room, ascii_only)),
        ("trainer", _trainer(view, room, ascii_only)),
        ("engine", _engine(view)),
        ("queue", _queue(view)),
        ("attempts", _attempts(view)),
        ("left out", _left_out(view)),
        ("slow reward", _slow(view.slow_rewards, room)),
        ("stragglers", _slow(view.stragglers, room)),
    ):
        for number, line in enumerate([] if text is None else text.split("\n")):
            line.truncate(room, overflow="crop" if ascii_only else "ellipsis")
            rows.add_row("" if number else label, line)
    return Group(
        _header(view, name, now, width, ascii_only, gone),
        "",
        rows,
        "",
        _verdict(view),
        *(_killed(view) if gone else _warnings(view, width, ascii_only)),
    )


def _header(view: WatchView, name: str, now: float, width: int, ascii_only: bool, gone: bool) -> Text:
    silent = now - view.last_written
    if view.error is not None:
        state, colour = f"ended with {view.error.split(':')[0]}", "red"
    elif view.ended:
        state, colour = "finished", "green"
    elif gone:
        state, colour = "ended without saying so", "red"
    elif view.starting:
        state, colour = f"starting for {_duration(max(0.0, silent))}, no step yet", "green"
    elif silent > max(SILENT, 5 * (view.step_seconds or 0.0)):
        state, colour = f"silent for {_duration(silent)}", "dark_orange"
    else:
        state, colour = f"running, last step {_duration(max(0.0, silent))} ago", "green"
    room = width - len(state) - 2
    if cell_len(name) > room:
        dots = "..." if ascii_only else "…"
        name = dots + name[-(room - len(dots)) :]
    return Text.assemble((name, "bold"), "  ", (state, colour))


def _progress(view: WatchView, room: int, ascii_only: bool) -> Text:
    words = f"step {view.step}" + (f" of {view.max_steps}" if view.max_steps else "")
    if view.step_seconds is not None:
        words += f", {_duration(view.step_seconds)} each"
    if not view.max_steps:
        return Text(words)
    left = view.max_steps - view.step
    if view.step_seconds is not None and left > 0 and not view.ended:
        words += f", {_duration(left * view.step_seconds)} left"
    bar = _bar([(view.step / view.max_steps, "blue")], min(24, room - len(words) - 1), ascii_only)
    return bar + Text(f" {words}")


def _reward(view: WatchView, room: int, ascii_only: bool) -> Text | None:
    if not view.rewards:
        return None
    recent = view.rewards[-8:]
    words = f" {sum(recent) / len(recent):.3f} (mean of the last {len(recent)})"
    if ascii_only:
        return Text(words.strip())
    means = _binned(view.rewards, max(1, min(24, room - len(words))))
    low, span = min(means), (max(means) - min(means)) or 1.0
    ticks = "".join(TICKS[round((mean - low) / span * (len(TICKS) - 1))] for mean in means)
    return Text(ticks, "blue") + Text(words)


def _staleness(view: WatchView, room: int, ascii_only: bool) -> Text | None:
    """A bar for each staleness, side by side if there are few."""
    if not view.staleness:
        return None
    shown = list(view.staleness.items())
    if len(shown) > 6:  # those above together
        shown = [*shown[:5], (shown[5][0], sum(share for _, share in shown[5:]))]
    more = len(view.staleness) > 6
    parts = []
    for place, (value, share) in enumerate(shown):
        plus = "+" if more and place == 5 else " "
        parts.append(Text(f"{value}{plus}") + _bar([(share, "cyan")], 10, ascii_only) + Text(f" {share:4.0%}  "))
    each = max(1, room // max(len(part) for part in parts))
    lines = [Text().join(parts[at : at + each]) for at in range(0, len(parts), each)]
    return Text("\n").join(lines)


def _trainer(view: WatchView, room: int, ascii_only: bool) -> Text | None:
    numbers = view.numbers
    if numbers is None:
        return None
    shares = {"training": numbers.training, "waiting": numbers.waiting, "publishing": numbers.publishing}
    bar = _bar([(share, COLOURS[name]) for name, share in shares.items()], min(24, room), ascii_only)
    words = [Text(f"{name} {share:.0%}", COLOURS[name]) for name, share in shares.items()]
    line = Text(", ").join(words)
    return bar + Text(" ") + line if len(bar) + 1 + len(line) <= room else line


def _engine(view: WatchView) -> Text | None:
    numbers, parts = view.numbers, []
    if numbers is not None:
        parts.append(f"idle {1 - numbers.engine_busy:.0%}, rewards idle {1 - numbers.rewards_busy:.0%}")
    if view.tokens_per_second is not None:
        parts.append(f"{view.tokens_per_second:,.0f} tokens/s")
    if view.take is not None and view.take.get("restarts"):
        parts.append(f"{view.take['restarts']} restarts")
    return Text(", ".join(parts)) if parts else None


def _queue(view: WatchView) -> Text | None:
    take = view.take
    if take is None or "ready" not in take:
        return None
    return Text(
        f"{take['sampling']} sampling, {take['scoring']} scoring, {take['ready']} ready, of {take['capacity']} at most"
    )


def _attempts(view: WatchView) -> Text | None:
    if not view.outcomes:
        return None
    return Text(", ".join(f"{count} {outcome}" for outcome, count in view.outcomes.most_common()))


def _left_out(view: WatchView) -> Text | None:
    if not view.left_out:
        return None
    total = view.left_out.total()
    return Text(f"{total} row{'s' if total > 1 else ''}: {reasons_in_words(view.left_out)}")


def _slow(groups: list[SlowGroup], room: int) -> Text | None:
    """As many of the groups as there is room for, but at least one."""
    words = ""
    for group in groups:
        named = f"prompt {group.prompt} {_duration(group.seconds)} ({group.times:.1f}x)"
        if words and len(words) + 2 + len(named) > room:
            break
        words += f", {named}" if words else named
    return Text(words) if words else None


def _verdict(view: WatchView) -> Text:
    verdict = view.verdict
    if verdict is None:
        return Text("What limits the run is known after three batches.", "italic")
    colour = LIMIT_COLOURS.get(verdict.limit, "dark_orange")
    limit, _, rest = verdict.sentence.partition(":")
    text = Text.assemble((f"{limit}:", f"bold {colour}"), rest)
    if verdict.setting is not None:
        text.append(f"\nsetting to change: {verdict.setting}", "bold")
    return text


def _warnings(view: WatchView, width: int, ascii_only: bool) -> list[Text]:
    if view.error is not None:
        return [Text(""), Text(" ".join(view.error.split()), "red")]
    if not view.warnings:
        return []
    count = f"1 of {len(view.warnings)} warnings" if len(view.warnings) > 1 else "warning"
    last = Text(f"{count}: {' '.join(view.warnings[-1].split())}", "yellow")
    last.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return [Text(""), last]


def _killed(view: WatchView) -> list[Text]:
    words = how_it_was_left(view.step)
    return [Text(""), Text(words[0].upper() + words[1:], "red")]


def _bar(parts: list[tuple[float, str]], width: int, ascii_only: bool) -> Text:
    """A bar of `width` cells, of which each part has its share."""
    full, empty = ("#", "-") if ascii_only else ("█", "░")
    bar, reached = Text(), 0.0
    for share, colour in parts:
        since, reached = reached, min(1.0, reached + share)
        bar.append(full * (round(reached * max(0, width)) - round(since * max(0, width))), colour)
    return bar.append(empty * (max(0, width) - len(bar)), "dim")


def _binned(values: list[float], bins: int) -> list[float]:
    """Means of equal parts of `values`, at most `bins` of them."""
    size = math.ceil(len(values) / bins)
    parts = [values[at : at + size] for at in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days"
