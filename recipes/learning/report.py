"""The table, the verdicts on the papers' claims and the figures of the study, from its results.

Guarantees: a verdict compares runs of the same seed and task, and says how far three seeds can carry it (`judge`).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from learning.results import Result, half_width, judge, paired, seconds_to, spread, summary
from learning.runs import ASYNC, GRPO_TRAINER, METHODS
from matplotlib.figure import Figure
from rich.table import Table

from trl_a3po import A3POConfig

OWN_CAP: float = A3POConfig.behavior_weight_cap
EQUAL = 0.02  # of reward: what counts as no worse
BIN = 5  # steps of a drawn point
COLUMNS = ("reward", "held-out", "whole reward", "entropy", "clipped", "w min", "w max", "r min", "r max", "rho max",
           "ESS", "step seconds")  # fmt: skip
COLOURS = dict(
    zip(
        METHODS,
        ("#d55e00", "#000000", "#009e73", "#0072b2", "#56b4e9", "#cc79a7", "#e69f00", "#8c8c00", "#999999"),
        strict=True,
    )
)

Cell = tuple[str, str, int]  # task, method, staleness
Numbers = dict[Cell, dict[int, dict[str, float]]]  # -> seed -> name -> value


def numbers(results: Sequence[Result]) -> Numbers:
    """The summaries of the finished runs with their method's own cap, by cell and seed. The runs share their learning
    rate."""
    found: Numbers = {}
    for one in results:
        if one.done and one.run.cap in (None, OWN_CAP):
            run = one.run
            summed = {**summary(one.steps, run.staleness), "held-out": one.end["held_out"]}
            found.setdefault((run.task, run.method, run.staleness), {})[run.seed] = summed
    return found


def table(results: Sequence[Result], title: str) -> Table:
    shown = Table("task", "method", "d", "seeds", *COLUMNS, title=f"{title}: mean over the seeds (range)")
    for (task, method, d), seeds in sorted(numbers(results).items()):
        cells = [spread([run[name] for run in seeds.values()]) for name in COLUMNS]
        shown.add_row(task, method, str(d), str(len(seeds)), *cells)
    return shown


@dataclass(frozen=True)
class Claim:
    """`one` has more of `what` than `other`, or at most `margin` less.

    Args:
        fresh: whether `other` is at staleness 0.
    """

    text: str
    what: str
    one: str
    other: str
    margin: float = 0.0
    fresh: bool = False


CLAIMS = (
    Claim("A-3PO: the policy that sampled, as the anchor, clips more tokens", "clipped", "behavior", "loglinear"),
    Claim("A-3PO: more reward than with the policy that sampled as the anchor", "reward", "loglinear", "behavior"),
    Claim("A-3PO: as much reward as with the recomputed anchor", "reward", "loglinear", "recompute", EQUAL),
    Claim("A-3PO: as much held-out reward as with the recomputed anchor", "held-out", "loglinear", "recompute", EQUAL),
    Claim("A-3PO: more entropy is left than with the recomputed anchor", "entropy", "loglinear", "recompute"),
    Claim("A-3PO: the recomputed anchor costs time", "step seconds", "recompute", "loglinear"),
    Claim("A-3PO: as much reward as fresh data give", "reward", "loglinear", "behavior", EQUAL, fresh=True),
    Claim("reuse is recompute at one step a batch", "reward", "reuse", "recompute", EQUAL),
    Claim("the cap on w costs no reward", "reward", "loglinear", "loglinear, no cap", EQUAL),
    Claim("IcePop: masking does no harm", "reward", "icepop", "reuse", EQUAL),
    Claim("ASymPO: about GRPO's reward without behavior log-probs", "reward", "asympo", "behavior", EQUAL),
    Claim("ASymPO: more reward than without a correction", "reward", "asympo", "plain"),
    Claim("SPO: about GRPO's reward without behavior log-probs", "reward", "spo", "behavior", EQUAL),
    Claim("ASymPO: without a correction, stale data break training", "reward", "behavior", "plain"),
)  # fmt: skip


def verdicts(results: Sequence[Result]) -> list[str]:
    """Each claim, at each staleness above 1 and on each task, with the mean difference and its 95% interval."""
    found = numbers(results)
    said = []
    for claim in CLAIMS:
        for task, method, d in sorted(found):
            if method == claim.one and d >= 2:
                ours = {seed: run[claim.what] for seed, run in found[task, method, d].items()}
                theirs = found.get((task, claim.other, 0 if claim.fresh else d), {})
                said += _verdict(
                    claim, f"{task}, d {d}", paired(ours, {seed: run[claim.what] for seed, run in theirs.items()})
                )
    return [*said, *_contractions(found), *_clock(results)]


def _verdict(claim: Claim, where: str, differences: Sequence[float]) -> list[str]:
    known = [value for value in differences if not math.isnan(value)]
    if not known:
        return []
    half = half_width(known)
    width = "one seed" if math.isinf(half) else f"± {half:.3g}, {len(known)} seeds"
    below = f", no worse by {claim.margin}" if claim.margin else ""
    return [
        f"{claim.text} ({where}): {claim.what} {statistics.mean(known):+.3g} ({width}{below}): "
        f"{judge(known, claim.margin)}"
    ]


def _contractions(found: Numbers) -> list[str]:
    said = []
    for (task, method, d), seeds in sorted(found.items()):
        if method == "loglinear" and d >= 2:
            values = [run["contraction"] for run in seeds.values() if not math.isnan(run["contraction"])]
            agree = all(abs(value - 1 / d) < 0.2 / d for value in values)
            if not values:
                continue
            said.append(
                f"A-3PO: r is ρ^(1/d) ({task}, d {d}): log r / log ρ is {spread(values)}, 1/d = {1 / d:.3g}: "
                f"{'holds, by construction' if agree else 'refuted'}"
            )
    return said


def _clock(results: Sequence[Result]) -> list[str]:
    """Seconds to the reward that GRPOTrainer has at the end, of the runs that had a GPU to themselves."""
    alone = {(r.run.method, r.run.task, r.run.seed): r for r in results if r.done and r.run.alone}
    said = []
    for (method, task, seed), theirs in sorted(alone.items()):
        ours = alone.get((ASYNC, task, seed))
        if method == GRPO_TRAINER and ours is not None:
            target = 0.9 * summary(theirs.steps, 0)["reward"]
            said.append(
                f"{task}, seed {seed}: reward {target:.2f} (nine tenths of GRPOTrainer's last) after "
                f"{seconds_to(theirs, target):.1f} s with GRPOTrainer, {seconds_to(ours, target):.1f} s with "
                f"A3POTrainer; all steps in {theirs.steps['seconds'][-1]:.1f} s and {ours.steps['seconds'][-1]:.1f} s"
            )
    return said


# --- figures ------------------------------------------------------------------------------------------------------

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward",)),
    ("entropy", ("entropy",)),
    ("clipped tokens", ("clip_low", "clip_high")),
)


def draw(results: Sequence[Result], task: str, path: Path) -> None:
    """Reward, entropy and clipped tokens by step: a column for each staleness, a line for each method. No file is
    written where no run has `BIN` steps."""
    mine = [one for one in results if one.run.task == task and one.run.method in METHODS and len(one) >= BIN]
    if not mine:
        return
    columns = sorted({one.run.staleness for one in mine})
    figure = Figure(figsize=(1.6 + 4.2 * len(columns), 9), layout="constrained")
    axes = figure.subplots(len(PANELS), len(columns), squeeze=False, sharex=True, sharey="row")
    for column, d in enumerate(columns):
        axes[0][column].set_title(f"{task}, staleness {d}", loc="left", fontweight="bold")
        axes[-1][column].set_xlabel("optimizer step")
        for method in METHODS:
            runs = [one for one in mine if one.run.staleness == d and one.run.method == method]
            for row, (_, names) in enumerate(PANELS):
                curves = [binned(one, names) for one in runs]
                draw_band(axes[row][column], [curve for curve in curves if curve], method)
    for row, (name, _) in enumerate(PANELS):
        axes[row][0].set_ylabel(name)
        for panel in axes[row]:
            panel.spines[["top", "right"]].set_visible(False)
    lines = {line.get_label(): line for panel in axes[0] for line in panel.get_lines()}
    handles = [lines[method] for method in METHODS if method in lines]
    figure.legend(handles=handles, frameon=False, loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def binned(result: Result, names: Sequence[str]) -> list[float]:
    """Means over `BIN` steps each of the sum of the columns `names`; nothing where the run does not log them."""
    if any(name not in result.steps for name in names):
        return []
    sums = [sum(value or 0.0 for value in values) for values in zip(*(result.steps[n] for n in names), strict=True)]
    return [statistics.mean(sums[begin : begin + BIN]) for begin in range(0, len(sums) - BIN + 1, BIN)]


def draw_band(axes, curves: Sequence[Sequence[float]], method: str) -> None:
    """The mean of the runs, in a band from the smallest to the largest; a run that was cut counts while it lasts."""
    if not curves:
        return
    by_point = [[curve[i] for curve in curves if i < len(curve)] for i in range(max(map(len, curves)))]
    steps = [BIN * (i + 1) for i in range(len(by_point))]
    axes.fill_between(
        steps, [*map(min, by_point)], [*map(max, by_point)], color=COLOURS[method], alpha=0.12, linewidth=0
    )
    axes.plot(steps, [*map(statistics.mean, by_point)], color=COLOURS[method], linewidth=1.6, label=method)


def draw_sweep(results: Sequence[Result], path: Path) -> None:
    """Reward of the last fifth of the steps of the log-linear anchor, by learning rate and staleness, a panel for each
    cap. No file is written where no two learning rates were trained."""
    swept: dict[float, dict[tuple[int, float], dict[int, float]]] = {}  # cap -> (staleness, rate) -> seed -> reward
    for one in results:
        run = one.run
        if one.done and run.method == "loglinear":
            cell = swept.setdefault(OWN_CAP if run.cap is None else run.cap, {})
            cell.setdefault((run.staleness, run.learning_rate), {})[run.seed] = summary(one.steps, 0)["reward"]
    rates = sorted({rate for cells in swept.values() for _, rate in cells})
    lags = sorted({lag for cells in swept.values() for lag, _ in cells})
    if len(rates) < 2:
        return
    figure = Figure(figsize=(1.8 + (0.5 + 0.8 * len(rates)) * len(swept), 1.4 + 0.6 * len(lags)), layout="constrained")
    axes = figure.subplots(1, len(swept), squeeze=False, sharey=True)[0]
    largest = max(statistics.mean(seeds.values()) for cells in swept.values() for seeds in cells.values())
    for panel, cap in zip(axes, sorted(swept), strict=True):
        means = {cell: statistics.mean(seeds.values()) for cell, seeds in swept[cap].items()}
        grid = [[means.get((lag, rate), math.nan) for rate in rates] for lag in lags]
        image = panel.imshow(grid, vmin=0, vmax=largest, cmap="viridis", aspect="auto", origin="lower")
        for (lag, rate), value in means.items():
            colour = "w" if value < 0.6 * largest else "k"
            panel.text(rates.index(rate), lags.index(lag), f"{value:.2f}", ha="center", va="center", color=colour)
        panel.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        panel.set_yticks(range(len(lags)), [str(lag) for lag in lags])
        panel.set_xlabel("learning rate")
        panel.set_title("no cap on w" if math.isinf(cap) else f"w up to {cap:g}", loc="left", fontweight="bold")
    axes[0].set_ylabel("staleness")
    figure.colorbar(image, ax=list(axes), label="reward")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
