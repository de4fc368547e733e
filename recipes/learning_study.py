"""What a pretrained model learns from stale data under each correction: a study on one or two GPUs, in minutes.

    python recipes/learning_study.py --gpus 0 1 --parallel 5 --budget 900
    python recipes/learning_study.py --gpus 0 1 --parallel 5 --budget 900     # again: goes on where the budget ended
    python recipes/learning_study.py --sweep --gpus 0 1 --parallel 5 --budget 300     # learning rate, staleness, cap
    python recipes/learning_study.py --figure                                 # tables, verdicts and figures again
    python recipes/learning_study.py --figure --until 50                      # of the first 50 steps, of cut runs too
    python recipes/learning_study.py --steps 2 --tasks sums --methods loglinear --seeds 0     # a look, on a CPU

SmolLM2-135M-Instruct, all weights trained in float32, on two tasks of reasoning-gym. `schedule="fixed_lag"` trains
every token at exactly the staleness that a run is named for, so runs of a seed differ in staleness and correction
only. At staleness 0 all anchors are the same, and one run stands for them. Every step is in the file of its run as
soon as it is done; `results.jsonl`, in the same folder, has all runs and is what the tables and figures are made from.

First, each GPU has a run of GRPOTrainer and of A3POTrainer to itself, to compare their seconds. On a CPU,
`--clock_seeds` asks for such runs, and every optimizer step is printed.
"""

import argparse
import fcntl
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

from learning.output import output_folder
from learning.parallel import run_parallel
from learning.report import draw, draw_sweep, table, verdicts
from learning.results import first_steps, read_results, write_results
from learning.runs import ASYNC, GENERATIONS, GRPO_TRAINER, METHODS, PROMPTS, Run, Settings, train
from learning.tasks import TASKS
from rich.console import Console

FRESH = ("behavior", "asympo", "spo")  # what differs at staleness 0
ROLLED = 20.0  # seconds between two writings of the results


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--clock_seeds", type=int, nargs="*", help="of runs that are alone; 0 and 1 with --gpus, else none"
    )
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of a run")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step")
    parser.add_argument("--generations", type=int, default=GENERATIONS, help="completions of a prompt")
    parser.add_argument("--learning_rate", type=float, default=3e-6)
    parser.add_argument("--sweep", action="store_true", help="learning rates, staleness and caps instead of methods")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5], help="of the sweep")
    parser.add_argument("--caps", type=float, nargs="+", default=[1.5, 5.0, math.inf], help="of the sweep; inf: none")
    parser.add_argument("--model", help="folder or hub name; by default SmolLM2-135M-Instruct from the package index")
    parser.add_argument("--gpus", type=int, nargs="*", default=[], help="their numbers; none: on the CPU")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time on each GPU")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds, after which every run is stopped")
    parser.add_argument("--figure", action="store_true", help="train nothing")
    parser.add_argument("--until", type=int, help="report the first steps alone, of every run that has as many")
    parser.add_argument("--output", default="outputs/learning_study")
    arguments = parser.parse_args()
    if arguments.until is not None and arguments.until < 1:
        parser.error(f"--until is {arguments.until}, but it must be a number of steps, 1 or more")
    if arguments.clock_seeds is None:
        arguments.clock_seeds = [0, 1] if arguments.gpus else []
    return arguments


def clock_runs(arguments) -> list[Run]:
    """GRPOTrainer and asynchronous A3POTrainer, on the first task."""
    return [
        Run(arguments.tasks[0], method, staleness, seed, arguments.learning_rate, alone=True)
        for seed in arguments.clock_seeds
        for method, staleness in ((GRPO_TRAINER, 0), (ASYNC, 2))
    ]


def study_runs(arguments) -> list[Run]:
    """The most informative first: the first seed of every cell of the first task, its other seeds, the other tasks."""
    return [
        Run(task, method, staleness, seed, arguments.learning_rate)
        for task, seed, staleness, method in product(
            arguments.tasks, arguments.seeds, arguments.staleness, arguments.methods
        )
        if staleness > 0 or method in FRESH
    ]


def sweep_runs(arguments) -> list[Run]:
    """Learning rate, staleness and cap of the log-linear anchor, on the first task."""
    return [
        Run(arguments.tasks[0], "loglinear", staleness, seed, rate, cap)
        for seed, rate, staleness, cap in product(
            arguments.seeds, arguments.rates, arguments.staleness, arguments.caps
        )
    ]


def remaining(runs: list[Run], output: Path) -> list[Run]:
    """The runs that no earlier call finished."""
    done = {result.run.name for result in read_results(output) if result.done}
    return [run for run in runs if run.name not in done]


def train_all(arguments, output: Path, deadline: float) -> None:
    settings = Settings(
        arguments.model or _smollm2(), arguments.steps, arguments.prompts, arguments.generations, str(output)
    )
    written = 0.0

    def roll() -> None:
        nonlocal written
        if time.monotonic() - written > ROLLED:
            written = time.monotonic()
            results = read_results(output)
            write_results(output, results)
            print(f"{sum(result.done for result in results)} runs are finished", flush=True)

    phases = [(sweep_runs(arguments), arguments.parallel)]
    if not arguments.sweep:
        phases = [(clock_runs(arguments), 1), (study_runs(arguments), arguments.parallel)]
    for runs, parallel in phases:
        run_parallel(
            partial(train, settings=settings),
            remaining(runs, output),
            gpus=arguments.gpus,
            parallel=parallel,
            deadline=deadline,
            watch=roll,
        )


def _smollm2() -> str:
    from smollm2 import smollm2_path

    return smollm2_path()


def report(output: Path, console: Console, until: int | None = None) -> None:
    results = read_results(output)
    write_results(output, results)
    if until is not None:
        results = first_steps(results, until)
    rates = sorted({result.run.learning_rate for result in results})
    for rate in rates:
        alike = [result for result in results if result.run.learning_rate == rate]
        console.print(table(alike, f"learning rate {rate:g}"))
        for verdict in verdicts(alike):
            console.print(verdict)
        at_rate = f"_{rate:g}" if len(rates) > 1 else ""
        for task in sorted({result.run.task for result in alike}):
            draw(alike, task, output / f"learning_{task}{at_rate}.png")
    draw_sweep(results, output / "learning_sweep.png")
    console.print(f"Results and figures are in {output}")
    console.save_text(str(output / "report.txt"))


@contextmanager
def alone_in(output: Path) -> Iterator[None]:
    """Two studies would write the same files."""
    with (output / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"Another study is training into {output}: pass another folder as --output, or wait for it.")
        yield


def main():
    arguments = parse_arguments()
    deadline = time.monotonic() + arguments.budget
    output = output_folder(arguments.output)
    try:
        read_results(output)  # before anything is trained
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if not arguments.figure:
        with alone_in(output):
            train_all(arguments, output, deadline)
    report(output, Console(width=220, record=True), arguments.until)


if __name__ == "__main__":
    main()
