"""Learning curves of a recipe: one run for each trainer and seed, kept as JSON and drawn as mean and range."""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from transformers import PrinterCallback, Trainer, TrainerCallback

Curve = list[dict[str, float]]  # a point for each optimizer step: its number, its seconds and its reward

COLOURS = ("#0072b2", "#d55e00")
WINDOW = 5  # steps over which a drawn reward is averaged


class RewardLog(TrainerCallback):
    """The curve of a run, printed as it grows. Seconds count from the first step's beginning."""

    def __init__(self, name: str):
        self.name, self.curve, self._began = name, [], 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            seconds = time.perf_counter() - self._began
            self.curve.append({"step": state.global_step, "seconds": round(seconds, 2), "reward": logs["reward"]})
            print(f"{self.name}: step {state.global_step}, {seconds:.0f} s, reward {logs['reward']:.2f}", flush=True)


def curve_of(trainer: Trainer, name: str) -> Curve:
    """Train, and return the curve."""
    log = RewardLog(name)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(log)
    trainer.train()
    return log.curve


def study(
    run: Callable[[str, int, int, str], Curve],
    *,
    name: str,
    title: str,
    steps: int,
    seeds: Sequence[int] = (0, 1, 2),
    arms: Sequence[str] = ("A3POTrainer",),
    against: str = "step",
    output: str = "outputs/agents",
) -> None:
    """Run every arm with every seed, write `NAME.json` and `NAME.png`, and say what has been learned.

    Args:
        run: called with an arm, a seed, the number of optimizer steps and a folder; returns the curve.
        name: of the files.
        title: of the figure.
        steps: optimizer steps, by default.
        seeds: by default.
        arms: what is compared.
        against: what the figure has from left to right, `"step"` or `"seconds"`.
        output: the folder of the files, by default.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps of a run")
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms)
    parser.add_argument("--output", default=output)
    arguments = parser.parse_args()
    if not torch.accelerator.is_available():
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # the engine has the other half of the cores
    curves: dict[str, list[Curve]] = {arm: [] for arm in arguments.arms}
    output, console = Path(arguments.output), Console()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for arm in arguments.arms:
                curves[arm].append(run(arm, seed, arguments.steps, folder))
                (output / f"{name}.json").write_text(json.dumps(curves))
    draw(curves, title, against, output / f"{name}.png")
    for arm, runs in curves.items():
        for seed, curve in zip(arguments.seeds, runs, strict=True):
            console.print(f"{arm}, seed {seed}: {summary(curve)}")
    console.print(f"Drawn in {output / f'{name}.png'}")


def summary(curve: Curve) -> str:
    first, last = (statistics.mean(point["reward"] for point in part) for part in (curve[:WINDOW], curve[-WINDOW:]))
    seconds = curve[-1]["seconds"]
    return f"reward {first:.2f} in the first {WINDOW} steps, {last:.2f} in the last, after {seconds:.0f} s"


def draw(curves: dict[str, list[Curve]], title: str, against: str, path: Path) -> Figure:
    """The mean of the seeds in a band from the lowest to the highest; each averaged over `WINDOW` steps."""
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for (arm, runs), colour in zip(curves.items(), COLOURS, strict=False):
        across = [statistics.mean(points[i][against] for points in runs) for i in range(len(runs[0]))]
        by_step = list(zip(*(smoothed([point["reward"] for point in run]) for run in runs), strict=True))
        axes.fill_between(across, [*map(min, by_step)], [*map(max, by_step)], color=colour, alpha=0.2, linewidth=0)
        axes.plot(across, [*map(statistics.mean, by_step)], color=colour, linewidth=2, label=arm)
    axes.set(xlabel="optimizer step", ylabel="reward", ylim=(0, 1.02))
    if against == "seconds":
        axes.set(xlabel="seconds (logarithmic)", xscale="log")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    return figure


def smoothed(rewards: list[float]) -> list[float]:
    """The mean of each reward and of those before it, at most `WINDOW`."""
    sums = [0.0, *accumulate(rewards)]
    return [(sums[i + 1] - sums[max(0, i + 1 - WINDOW)]) / min(i + 1, WINDOW) for i in range(len(rewards))]
