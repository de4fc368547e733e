"""The charts of a report as Plotly figures: dictionaries with `data` and `layout`.

Guarantees: pure; a chart draws at most `MOST_POINTS` points a line, as means over neighbouring steps, so that its size
does not grow with the run; a chart whose values are missing is `None`. A colour that begins with `$` is one of the
page's, which differ between light and dark.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trl_a3po.report.gantt import rows_of
from trl_a3po.report.history import OF_STALENESS
from trl_a3po.report.html.activity import ACTIVITIES, Array, groups_by_phase, time_edges, trainer_by_activity
from trl_a3po.report.html.reported_run import PHASES, Lines, ReportedRun

Figure = dict[str, Any]

MOST_POINTS = 300
GANTT_TAKES, GANTT_GROUPS = 8, 400
LOG_FROM = 4.0  # times the smallest ratio, from which the axis of ratios is logarithmic
PHASE_COLOURS = dict(zip(PHASES, ("$blue", "$sand", "$amber", "$pale"), strict=True))
TRAINER_COLOURS = {
    "training": "$slate",
    "publishing": "$green",
    "waiting": "$orange",
    "evaluation": "$violet",
    "engine start": "$teal",
}
QUANTITY_COLOURS = {  # in every chart
    "effective sample size": "$blue",
    "clipped high": "$orange",
    "clipped low": "$green",
    "w capped": "$violet",
}
OUTSIDE = {"clipped high": "clip/high", "clipped low": "clip/low", "w capped": "w/capped"}
"""Shares of the tokens that the trust region or the cap holds back: name -> metric."""
RUN_COLOURS = ("$blue", "$orange", "$green", "$violet", "$amber", "$red", "$ink")


def charts_of_run(run: ReportedRun) -> dict[str, Figure]:
    """The charts of one run by the name of their place in the page."""
    charts = {
        "activity": activity(run.lines),
        "gantt": gantt(run.lines),
        "staleness": staleness_over_time(run.steps),
        "staleness-share": staleness_of_tokens(run.steps),
        "ratios": ratios_by_staleness(run.steps, {"w": "w", "r": "r", "ρ": "rho"}),
        "clipping": clipping_by_staleness(run.steps),
        "entropy-by-staleness": entropy_by_staleness(run.steps),
        "ess": effective_sample_size(run.steps),
        "clipping-over-time": clipping_over_time(run.steps),
        "reward": reward_over_time(run.steps),
        "reward-distribution": histogram(
            [sum(v for v in r["rewards"].values() if v is not None) for r in run.rollouts], "reward of a rollout"
        ),
        "length": lengths_over_time(run.steps),
        "length-distribution": histogram([r["length"] for r in run.rollouts], "tokens of a completion"),
        "entropy": lines_over_time(run.steps, {"entropy": "entropy"}, axis="nats a token"),
        "gradient": lines_over_time(run.steps, {"gradient norm": "grad_norm"}, axis="norm"),
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def charts_of_comparison(runs: Sequence[ReportedRun]) -> dict[str, Figure]:
    """The charts in which every run is a line or a bar."""
    wanted = {
        "compare-reward": ("reward", "mean reward of a batch"),
        "compare-staleness": ("a3po/staleness/mean", "mean staleness"),
        "compare-ess": ("a3po/ess", "effective sample size"),
        "compare-length": ("completions/mean_length", "mean tokens of a completion"),
        "compare-entropy": ("entropy", "nats a token"),
    }
    charts = {name: _compared(runs, key, axis) for name, (key, axis) in wanted.items()}
    charts["compare-reward-time"] = _compared(runs, "reward", "mean reward of a batch", over_time=True)
    charts["compare-time"] = _compared_times(runs)
    return {name: chart for name, chart in charts.items() if chart is not None}


# --- who worked when -------------------------------------------------------------------------------------------------


def activity(lines: Lines) -> Figure | None:
    """Above, how many groups are in each phase; below, what share of its time the trainer spends on what."""
    edges = time_edges(lines)
    if not len(edges):
        return None
    unit, seconds = time_unit(edges[-1] - edges[0])
    middles = _numbers(((edges[1:] + edges[:-1]) / 2 - edges[0]) / seconds)
    groups = [
        {**_area(middles, number, phase, PHASE_COLOURS[phase], "groups")}
        for phase, number in groups_by_phase(lines, edges).items()
    ]
    trainer = [
        {**_area(middles, share, name, TRAINER_COLOURS[name], "trainer"), "yaxis": "y2"}
        for name, share in trainer_by_activity(lines, edges).items()
        if share.any()
    ]
    layout = {
        "height": 400,
        "xaxis": {"title": {"text": f"{unit} since the start"}, "anchor": "y2"},
        "yaxis": {"domain": [0.42, 1], "title": {"text": "groups"}, "rangemode": "tozero"},
        "yaxis2": {"domain": [0, 0.34], "title": {"text": "trainer's time"}, "range": [0, 1], "tickformat": ".0%"},
    }
    return {"data": groups + trainer, "layout": layout}


def gantt(lines: Lines) -> Figure | None:
    """The last takes: each group from its submission to its take, and below them what the trainer did."""
    takes = [line for line in lines if line["kind"] == "take"][-GANTT_TAKES:]
    if len(takes) < 2:
        return None
    end = max(line["ended"] for line in lines if line["kind"] in ("take", "step"))
    groups = [g for g in lines if g["kind"] == "group" and g["submitted"] and g["ended"] > takes[0]["began"]]
    groups = [g for g in groups if g["submitted"] < end][-GANTT_GROUPS:]
    start = max(takes[0]["began"], min((g["ended"] for g in groups), default=0.0) - 1e-9)
    rows = rows_of([(group["submitted"], group["ended"]) for group in groups])
    height = max(1.6, (max(rows, default=0) + 1) / 8)
    data = [*_group_bars(groups, rows, start), *_trainer_bars(lines, start, -0.9 - height / 2, height)]
    layout = {
        "height": int(min(620, max(260, 120 + 14 * max(rows, default=0)))),
        "barmode": "overlay",
        "xaxis": {"range": [0, end - start], "title": {"text": "seconds"}},
        "yaxis": {
            "range": [-1.2 - height, max(rows, default=0) + 0.7],
            "tickvals": [-0.9 - height / 2, max(rows, default=0) / 2],
            "ticktext": ["trainer", "groups"],
            "showgrid": False,
        },
    }
    return {"data": [trace for trace in data if trace["x"]], "layout": layout}


def _group_bars(groups: Lines, rows: list[int], start: float) -> list[Figure]:
    traces = []
    for phase, (since, until) in PHASES.items():
        known = [(row, group) for row, group in zip(rows, groups, strict=True) if group[since]]
        bars = [(row, g[since], g[until] or g["ended"], f"prompt {g['prompt']}: {phase}") for row, g in known]
        traces.append(_bars(bars, phase, PHASE_COLOURS[phase], start))
    return traces


def _trainer_bars(lines: Lines, start: float, middle: float, height: float) -> list[Figure]:
    traces = []
    for name, kind in {"training": "step", **ACTIVITIES}.items():
        spans = [line for line in lines if line["kind"] == kind and line["ended"] > start]
        bars = [(middle, span["began"], span["ended"], f"{name}, version {span['version']}") for span in spans]
        traces.append({**_bars(bars, name, TRAINER_COLOURS[name], start), "width": height})
    return traces


# --- staleness and the trust region ----------------------------------------------------------------------------------


def staleness_over_time(steps: Lines) -> Figure | None:
    """The share of the tokens of each staleness over the steps."""
    values = staleness_values(steps)
    if not values:
        return None
    entries = [entry for entry in steps if "a3po/staleness/mean" in entry]
    data = []
    for place, d in enumerate(values):
        x, share = binned(entries, f"a3po/d{d}/fraction", missing=0.0)
        data.append(
            {**_area(x, np.array(share), _named(d), shade(place, len(values)), "tokens"), "hovertemplate": "%{y:.1%}"}
        )
    x, mean = binned(entries, "a3po/staleness/mean")
    data.append(_line(x, mean, "mean staleness (right)", "$orange") | {"yaxis": "y2"})
    layout = {
        "xaxis": {"title": {"text": "optimizer step"}},
        "yaxis": {"range": [0, 1], "tickformat": ".0%", "title": {"text": "tokens"}},
        "yaxis2": {"overlaying": "y", "side": "right", "range": [0, values[-1] + 0.5], "showgrid": False, "dtick": 1},
    }
    return {"data": data, "layout": layout}


def staleness_of_tokens(steps: Lines) -> Figure | None:
    """The share of all trained tokens by staleness."""
    values = staleness_values(steps)
    if not values:
        return None
    shares = [
        _mean([entry.get(f"a3po/d{d}/fraction") or 0.0 for entry in steps if "a3po/staleness/mean" in entry])
        for d in values
    ]
    bars = {
        "type": "bar",
        "x": values,
        "y": _numbers(shares),
        "marker": {"color": [shade(i, len(values)) for i in range(len(values))]},
        "text": [f"{share:.0%}" for share in shares],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y:.1%} of the tokens",
        "showlegend": False,
    }
    layout = {"xaxis": _staleness_axis(values), "yaxis": {"tickformat": ".3~%", "rangemode": "tozero"}}
    return {"data": [bars], "layout": layout}


def ratios_by_staleness(steps: Lines, quantities: dict[str, str]) -> Figure | None:
    """For each staleness, the mean of each ratio over the steps, and how small and how large it was. The axis is
    logarithmic where the ratios differ by a factor, so that 1/2 is as far from 1 as 2 is."""
    values = staleness_values(steps)
    data: list[Figure] = []
    for (label, key), colour in zip(quantities.items(), RUN_COLOURS, strict=False):
        found = [(d, *_spread(steps, f"a3po/d{d}/{key}")) for d in values if _has(steps, f"a3po/d{d}/{key}/mean")]
        if not found:
            continue
        x, mean, least, most = zip(*found, strict=True)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label,
                "x": list(x),
                "y": _numbers(mean),
                "marker": {"color": colour, "size": 9, "symbol": ("circle", "square", "diamond")[len(data) % 3]},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "color": colour,
                    "thickness": 1.5,
                    "width": 3,
                    "array": _numbers(np.array(most) - np.array(mean)),
                    "arrayminus": _numbers(np.array(mean) - np.array(least)),
                },
                "hovertemplate": f"{label}: mean %{{y:.3f}}",
            }
        )
    for place, trace in enumerate(data):  # beside each other
        trace["x"] = [d + 0.16 * (place - (len(data) - 1) / 2) for d in trace["x"]]
    if not data:
        return None
    ends = [np.array(trace["y"]) + sign * np.array(trace["error_y"][side])
            for trace in data for sign, side in ((1, "array"), (-1, "arrayminus"))]  # fmt: skip
    least, most = np.min(ends), np.max(ends)
    axis: dict[str, Any] = {"title": {"text": "ratio"}, "nticks": 6}
    if least > 0 and most / least > LOG_FROM:
        axis |= {"type": "log", "tickformat": ".3~g"}
    return {"data": data, "layout": {"xaxis": _staleness_axis(values), "yaxis": axis, "hovermode": "closest"}}


def effective_sample_size(steps: Lines) -> Figure | None:
    """The effective sample size of ρ over the steps."""
    figure = lines_over_time(steps, {"effective sample size": "a3po/ess"}, axis="effective / trained tokens")
    if figure is not None:
        figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


def anything_outside(steps: Lines) -> bool | None:
    """Whether any token was clipped or had its weight capped; `None` if that was not logged."""
    shares = [entry[f"a3po/{key}"] for entry in steps for key in OUTSIDE.values() if f"a3po/{key}" in entry]
    return any(shares) if shares else None


def clipping_over_time(steps: Lines) -> Figure | None:
    """The shares of tokens that were clipped or capped, if any were."""
    if not anything_outside(steps):
        return None
    return lines_over_time(steps, {name: f"a3po/{key}" for name, key in OUTSIDE.items()}, axis="share of the tokens")


def clipping_by_staleness(steps: Lines) -> Figure | None:
    """For each staleness, the share of tokens that were clipped or capped, over all steps, if any were."""
    values = staleness_values(steps) if anything_outside(steps) else []
    data = []
    for label, key in OUTSIDE.items():
        found = [d for d in values if _has(steps, f"a3po/d{d}/{key}")]
        if found:
            shares = [_weighted(steps, d, key) for d in found]
            data.append(
                {
                    "type": "bar",
                    "name": label,
                    "x": found,
                    "y": _numbers(shares),
                    "marker": {"color": QUANTITY_COLOURS[label]},
                    "hovertemplate": f"{label}: %{{y:.2%}}",
                }
            )
    if not data:
        return None
    axis = {"tickformat": ".3~%", "rangemode": "tozero", "title": {"text": "tokens"}}
    return {"data": data, "layout": {"xaxis": _staleness_axis(values), "yaxis": axis, "barmode": "group"}}


def entropy_by_staleness(steps: Lines) -> Figure | None:
    """The mean entropy of the policy at the tokens of each staleness."""
    values = [d for d in staleness_values(steps) if _has(steps, f"a3po/d{d}/entropy")]
    if not values:
        return None
    entropy = {
        "type": "bar",
        "name": "entropy",
        "x": values,
        "y": _numbers([_weighted(steps, d, "entropy") for d in values]),
        "marker": {"color": "$blue"},
        "hovertemplate": "%{y:.3f} nats",
        "width": 0.5,
        "showlegend": False,
    }
    axis = {"title": {"text": "nats a token"}, "rangemode": "tozero"}
    return {"data": [entropy], "layout": {"xaxis": _staleness_axis(values), "yaxis": axis}}


# --- rewards, lengths, and lines over the steps ----------------------------------------------------------------------


def reward_over_time(steps: Lines) -> Figure | None:
    """The mean reward of each batch, its standard deviation, and that of each reward function if there are several."""
    if not _has(steps, "reward"):
        return None
    x, reward = binned(steps, "reward")
    data = []
    if _has(steps, "reward_std"):
        _, deviation = binned(steps, "reward_std", missing=0.0)
        high, low = (np.array(reward) + sign * np.array(deviation) for sign in (1, -1))
        hidden = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "x": x, "hoverinfo": "skip"}
        data += [
            {**hidden, "y": _numbers(high), "showlegend": False},
            {
                **hidden,
                "y": _numbers(low),
                "fill": "tonexty",
                "fillcolor": "$blue-faint",
                "name": "± standard deviation",
            },
        ]
    data.append(_line(x, reward, "reward", "$blue") | {"line": {"color": "$blue", "width": 2.5}})
    names = sorted({key for entry in steps for key in entry if key.startswith("rewards/") and key.endswith("/mean")})
    for key, colour in zip(names if len(names) > 1 else (), RUN_COLOURS[1:], strict=False):
        data.append(_line(*binned(steps, key), key.split("/")[1], colour))
    return {
        "data": data,
        "layout": {"xaxis": {"title": {"text": "optimizer step"}}, "yaxis": {"title": {"text": "reward"}}},
    }


def lengths_over_time(steps: Lines) -> Figure | None:
    """The shortest, the mean and the longest completion."""
    names = {
        "longest": "completions/max_length",
        "mean": "completions/mean_length",
        "shortest": "completions/min_length",
    }
    figure = lines_over_time(steps, names, axis="tokens")
    if figure is not None:
        figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


def lines_over_time(steps: Lines, quantities: dict[str, str], *, axis: str) -> Figure | None:
    """One line for each quantity that was logged."""
    data = [
        _line(*binned(steps, key), label, QUANTITY_COLOURS.get(label, colour))
        for (label, key), colour in zip(quantities.items(), RUN_COLOURS, strict=False)
        if _has(steps, key)
    ]
    if not data:
        return None
    layout: dict[str, Any] = {"xaxis": {"title": {"text": "optimizer step"}}, "yaxis": {"title": {"text": axis}}}
    if axis.startswith("share"):
        layout["yaxis"] |= {"tickformat": ".3~%", "rangemode": "tozero"}
    return {"data": data, "layout": layout}


def histogram(values: Sequence[float], axis: str) -> Figure | None:
    """How many of the values are where."""
    if not len(values):
        return None
    counts, edges = np.histogram(values, bins=_bins(values))
    bars = {
        "type": "bar",
        "x": _numbers((edges[1:] + edges[:-1]) / 2),
        "y": counts.tolist(),
        "width": _numbers(np.diff(edges) * 0.94),
        "marker": {"color": "$blue"},
        "showlegend": False,
        "customdata": [[f"{a:.4g}", f"{b:.4g}"] for a, b in pairwise(edges.tolist())],
        "hovertemplate": "%{y} rollouts from %{customdata[0]} to %{customdata[1]}<extra></extra>",
    }
    return {"data": [bars], "layout": {"xaxis": {"title": {"text": axis}}, "yaxis": {"title": {"text": "rollouts"}}}}


# --- several runs ----------------------------------------------------------------------------------------------------


def _compared(runs: Sequence[ReportedRun], key: str, axis: str, *, over_time: bool = False) -> Figure | None:
    data, title = [], "optimizer step"
    for run, colour in zip(runs, RUN_COLOURS, strict=False):
        if not _has(run.steps, key):
            continue
        x, values = binned(run.steps, key)
        if over_time:
            ended = {line["version"]: line["ended"] for line in run.of_kind("step")}
            begins = [line["time"] for line in run.of_kind("start")][:1]
            if not begins or not ended:
                continue
            known = sorted(ended)
            x, title = _numbers((np.interp(x, known, [ended[v] for v in known]) - begins[0]) / 60), "minutes"
        data.append(_line(x, values, run.name, colour))
    if len(data) < 2:
        return None
    return {"data": data, "layout": {"xaxis": {"title": {"text": title}}, "yaxis": {"title": {"text": axis}}}}


def _compared_times(runs: Sequence[ReportedRun]) -> Figure | None:
    """What share of the time of a step the trainer of each run spent on what."""
    shares = {run.name: times_of_step(run) for run in runs}
    shares = {name: seconds for name, seconds in shares.items() if seconds}
    if len(shares) < 2:
        return None
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": list(shares),
            "x": [s[name] for s in shares.values()],
            "marker": {"color": TRAINER_COLOURS[name]},
            "hovertemplate": f"{name}: %{{x:.2f}} s",
        }
        for name in ("training", "publishing", "waiting")
    ]
    layout = {
        "barmode": "stack",
        "height": 120 + 44 * len(shares),
        "yaxis": {"autorange": "reversed", "automargin": True},
        "xaxis": {"title": {"text": "seconds a step, in the mean"}},
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}


def times_of_step(run: ReportedRun) -> dict[str, float]:
    """Mean seconds of an optimizer step by what the trainer did; empty without a timeline."""
    steps = run.of_kind("step")[1:] or run.of_kind("step")
    if not steps:
        return {}
    since = steps[0]["began"]
    total = sum(step["ended"] - step["began"] for step in steps)
    parts = {
        name: sum(line["ended"] - line["began"] for line in run.of_kind(kind) if line["began"] >= since)
        for name, kind in (("publishing", "publish"), ("waiting", "take"))
    }
    seconds = {"training": max(0.0, total - sum(parts.values())), **parts}
    return {name: round(value / len(steps), 4) for name, value in seconds.items()}


# --- parts -----------------------------------------------------------------------------------------------------------


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which so many seconds are easy to read, and its seconds."""
    return ("seconds", 1.0) if seconds < 300 else ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def staleness_values(steps: Lines) -> list[int]:
    """The staleness values that occurred."""
    found = {int(match[1]) for entry in steps for key in entry if (match := OF_STALENESS.fullmatch(key))}
    return sorted(found)


def binned(steps: Lines, key: str, missing: float | None = None) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, as means over neighbouring entries where there are more than `MOST_POINTS`."""
    pairs = [(entry["step"], missing if entry.get(key) is None else entry[key]) for entry in steps]
    pairs = [(step, value) for step, value in pairs if value is not None and np.isfinite(value)]
    if not pairs:
        return [], []
    size = -(-len(pairs) // MOST_POINTS)
    table = np.array(pairs, dtype=float)
    x, y = np.array([table[at : at + size].mean(0) for at in range(0, len(table), size)]).T
    return _numbers(x), _numbers(y)


def shade(place: int, number: int) -> str:
    """The colour of a staleness value: the page's, from fresh to old."""
    return f"$stale{round(place * 6 / max(1, number - 1))}"


def _named(d: int) -> str:
    return "fresh" if d == 0 else f"{d} behind"


def _staleness_axis(values: list[int]) -> dict[str, Any]:
    return {"title": {"text": "staleness (optimizer steps)"}, "dtick": max(1, len(values) // 12), "showgrid": False}


def _area(x: list[float], y: Array, name: str, colour: str, stack: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": _numbers(y),
        "name": name,
        "stackgroup": stack,
        "line": {"width": 0, "color": colour, "shape": "hvh"},
        "fillcolor": colour,
        "hovertemplate": "%{y:.2f}",
    }


def _line(x: list[float], y: list[float], name: str, colour: str) -> dict[str, Any]:
    mode = "lines+markers" if len(x) <= 40 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "x": x,
        "y": y,
        "name": name,
        "line": {"color": colour, "width": 2},
        "marker": {"size": 5, "color": colour},
        "hovertemplate": "%{y:.4~g}",
    }


def _bars(bars: Sequence[tuple[float, float, float, str]], name: str, colour: str, start: float) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "marker": {"color": colour, "line": {"width": 0}},
        "width": 0.8,
        "y": [row for row, *_ in bars],
        "base": _numbers([began - start for _, began, _, _ in bars]),
        "x": _numbers([ended - began for _, began, ended, _ in bars]),
        "text": [text for *_, text in bars],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }


def _has(steps: Lines, key: str) -> bool:
    return any(entry.get(key) is not None for entry in steps)


def _spread(steps: Lines, key: str) -> tuple[float, float, float]:
    """Mean, smallest and largest."""
    entries = [entry for entry in steps if entry.get(f"{key}/mean") is not None]
    least = min(entry[f"{key}/min"] for entry in entries)
    return _mean([e[f"{key}/mean"] for e in entries]), least, max(entry[f"{key}/max"] for entry in entries)


def _weighted(steps: Lines, d: int, key: str) -> float:
    """The mean of a metric of the tokens of staleness `d`, each entry weighted by its share of such tokens."""
    entries = [entry for entry in steps if entry.get(f"a3po/d{d}/{key}") is not None]
    weights = [entry.get(f"a3po/d{d}/fraction") or 0.0 for entry in entries]
    values = [entry[f"a3po/d{d}/{key}"] for entry in entries]
    return float(np.average(values, weights=weights)) if sum(weights) else _mean(values)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _bins(values: Sequence[float]) -> Any:
    """Bins that have whole numbers in their middle where all values are whole and near each other."""
    low, high = min(values), max(values)
    if high == low:
        return np.array([low - 0.5, low + 0.5])
    if all(float(value).is_integer() for value in values) and high - low <= 40:
        return np.arange(low - 0.5, high + 1)
    return 40


def _numbers(values: Any) -> list[float]:
    """Rounded to six significant digits, to keep the page small."""
    return [float(f"{value:.6g}") for value in np.asarray(values, dtype=float).tolist()]
