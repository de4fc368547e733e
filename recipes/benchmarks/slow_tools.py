"""Tools that are slow, and sometimes very slow: GRPOTrainer and A3POTrainer on the same episodes.

    python recipes/benchmarks/slow_tools.py                               # a quarter of an hour, mostly GRPOTrainer's
    python recipes/benchmarks/slow_tools.py --arms A3POTrainer --steps 5  # one minute

A policy of 0.2 million parameters plays episodes of 1 to 8 turns. Each turn but the last calls a tool, an `async def`
that waits between 0.05 and 2 seconds, drawn from a log-normal distribution; every arm draws the same times.

The `bound` of a step is the longest of three things, each without the others: `generation` and `training` of a batch
whose tools do not wait, one after the other (schedule="sync"), and `tools`, the longest sum of waits of an episode of
the batch. A trainer that plays several batches at the same time may need less, and never less than `tools` divided by
their number, which is `max_staleness` + 1; `bound in flight` has this in place of `tools`. Seconds of a step are means
over steps after the warm-up, before the last batches have been submitted.
"""

import argparse
import itertools
import json
import math
import os
import platform
import random
import sys
import tempfile
import threading
import time
from asyncio import sleep
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import ClassVar

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_a3po import A3POConfig, A3POTrainer

sys.path.append(str(Path(__file__).parents[1] / "agents"))
from small_policy import small_policy

TURNS, GENERATIONS = 8, 4
MEDIAN, SPREAD, SHORTEST, LONGEST = 0.3, 1.0, 0.05, 2.0  # seconds; the spread is that of their logarithm
COLUMNS = ("step", "samples/s", "wait", "calls", "at once", "threads", "to bound", "to bound in flight")
ARMS = ("A3POTrainer", "GRPOTrainer")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=8, help=f"groups of {GENERATIONS} episodes an optimizer step")
    parser.add_argument("--max_staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, at least 1")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="CPU threads of trainer and engine together"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--json", help="write the numbers here")
    return parser.parse_args()


class Errand:
    """An episode that has to call its tool a number of times."""

    waits = True
    repeats: ClassVar[dict[int, itertools.count]] = {}  # episodes of a row so far
    calls = waiting = most_waiting = most_threads = 0

    def reset(self, number: int, calls: int, **row) -> str:
        repeat = next(self.repeats.setdefault(number, itertools.count())) % GENERATIONS
        self._left, self._waits, self._reward = calls, waits_of(number, repeat, calls), float(repeat % 2)
        return self._said()

    async def call(self) -> str:
        """Call once.

        Returns:
            how many calls are left
        """
        cls = type(self)
        cls.calls, cls.waiting = cls.calls + 1, cls.waiting + 1
        cls.most_waiting = max(cls.most_waiting, cls.waiting)
        cls.most_threads = max(cls.most_threads, threading.active_count())
        if self.waits and self._left > 0:
            await sleep(self._waits[self._left - 1])
        cls.waiting -= 1
        self._left -= 1
        return self._said()

    def get_reward(self) -> float:
        return self._reward

    def _said(self) -> str:
        return f"Calls left: {max(0, self._left)}."


def waits_of(number: int, repeat: int, calls: int) -> list[float]:
    """Seconds of each call of an episode: that of row `number` which is reset as the `repeat`-th."""
    draw = random.Random(f"{number} {repeat}")
    return [min(LONGEST, max(SHORTEST, MEDIAN * draw.lognormvariate(0, SPREAD))) for _ in range(calls)]


def rows(count: int) -> list[dict]:
    """The prompt is empty: `reset` writes behind it."""
    draw = random.Random(0)
    prompt = [{"role": "user", "content": ""}]
    return [{"prompt": prompt, "number": i, "calls": draw.randrange(TURNS)} for i in range(count)]


def example(calls: int) -> list[dict]:
    called = {"type": "function", "function": {"name": "call", "arguments": {}}}
    messages = [{"role": "user", "content": f"Calls left: {calls}."}]
    for left in range(calls - 1, -1, -1):
        messages += [
            {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "name": "call", "content": f"Calls left: {left}."},
        ]
    return [*messages, {"role": "assistant", "content": "Done."}]


class StepEnds(TrainerCallback):
    """When each step ended, and how long the trainer waited for its batch."""

    def __init__(self, arm: str):
        self.arm, self.ends, self.waits = arm, [], []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())
        print(f"{self.arm}: step {state.global_step} of {state.max_steps}", flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.waits.append(logs.get("a3po/time/wait", math.nan))


def run(arm: str, arguments, *, alone: bool = False) -> dict:
    """Train and measure. `alone`: the tools do not wait, and generation and training take turns."""
    ours = arm == "A3POTrainer"
    Errand.waits, Errand.repeats = not alone, {}
    Errand.calls = Errand.most_waiting = Errand.most_threads = 0
    torch.set_num_threads(max(1, arguments.threads // 2) if ours else arguments.threads)
    model, tokenizer = small_policy([example(i % TURNS) for i in range(256)], [Errand().call], steps=150, seed=0)
    last = arguments.warmup + arguments.steps
    ahead = 0 if alone or not ours else arguments.max_staleness  # the steps that nothing is submitted behind
    settings = {
        "per_device_train_batch_size": arguments.groups * GENERATIONS,
        "num_generations": GENERATIONS,
        "max_completion_length": 256,
        "max_tool_calling_iterations": TURNS - 1,
        "max_steps": last + ahead,
        "shuffle_dataset": False,
        "learning_rate": 1e-6,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if ours:
        schedule = {"schedule": "sync"} if alone else {"max_staleness": arguments.max_staleness}
        settings |= schedule | {"engine_threads": max(1, arguments.threads - arguments.threads // 2)}
    clock, load = StepEnds(f"{arm}, alone" if alone else arm), os.getloadavg()[0]
    data = rows(arguments.groups * (last + ahead))
    with tempfile.TemporaryDirectory() as folder:
        trainer = (A3POTrainer if ours else GRPOTrainer)(
            model,
            reward_funcs=None,
            args=(A3POConfig if ours else GRPOConfig)(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            environment_factory=Errand,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    steps = [after - before for before, after in itertools.pairwise(clock.ends[arguments.warmup - 1 : last])]
    return {
        "step": mean(steps),
        "samples/s": arguments.groups * GENERATIONS / mean(steps),
        "wait": mean(clock.waits[arguments.warmup : last]) if ours else None,
        "calls": Errand.calls / (last + ahead),  # a step
        "at once": Errand.most_waiting,
        "threads": Errand.most_threads,
        "load": [load, os.getloadavg()[0]],  # before and after, the benchmark's own included
        "seconds of steps": steps,
    }


def tool_seconds(arguments) -> tuple[float, float]:
    """Of a measured batch, on average: the longest sum of the waits of an episode, and the sum of all waits."""
    batch, data = arguments.groups, rows(arguments.groups * (arguments.warmup + arguments.steps))
    batches = [
        [
            sum(waits_of(row["number"], repeat, row["calls"]))
            for row in data[i : i + batch]
            for repeat in range(GENERATIONS)
        ]
        for i in range(batch * arguments.warmup, len(data), batch)
    ]
    return mean(map(max, batches)), mean(map(sum, batches))


def main():
    arguments, console = parse_arguments(), Console()
    alone = run("A3POTrainer", arguments, alone=True)
    tools, all_waits = tool_seconds(arguments)
    parts = {"generation": alone["wait"], "training": alone["step"] - alone["wait"], "tools": tools}
    in_flight = parts | {"tools": tools / (arguments.max_staleness + 1)}
    bounds = {"bound": max(parts.values()), "bound in flight": max(in_flight.values())}
    seconds = parts | {"all waits": all_waits} | bounds
    console.print("  ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
    numbers = {"arguments": vars(arguments), "environment": environment(), "seconds": seconds, "alone": alone}
    table = Table("arm", *COLUMNS, title_justify="left", title=f"{arguments.groups * GENERATIONS} episodes a step")
    for arm in arguments.arms:
        result = numbers[arm] = run(arm, arguments)
        result |= {f"to {name}": result["step"] / value for name, value in bounds.items()}
        table.add_row(arm, *("" if result[name] is None else f"{result[name]:.3g}" for name in COLUMNS))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(numbers, indent=1))
    console.print(table)


def environment() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "transformers", "trl")}
    return {"python": platform.python_version(), "cores": str(os.cpu_count())} | packages


if __name__ == "__main__":
    main()
