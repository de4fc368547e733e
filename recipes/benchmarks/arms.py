"""What the benchmarks share that compare several runs, called arms: each in processes of its own, by torchrun.

Guarantees: an arm that fails or takes too long costs no other one; after every arm the numbers so far are in the JSON
file. A benchmark parses its arguments with `add_arguments`, trains where `arguments.arm` is set, hands what it
measured to `end_arm` there, and calls `run_arms` elsewhere.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch


def add_arguments(parser: argparse.ArgumentParser, *, arms: Sequence[str], limit: float, json: str) -> None:
    """The arguments of `run_arms`, with their defaults."""
    parser.add_argument("--arms", nargs="+", default=arms)
    parser.add_argument("--limit", type=float, default=limit, help="seconds an arm may take")
    parser.add_argument("--json", default=json, help="write the numbers here")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # of one process of an arm
    parser.add_argument("--folder", help=argparse.SUPPRESS)


def run_arms(
    arguments: argparse.Namespace,
    columns: Sequence[str],
    *,
    processes: Callable[[str], int] = lambda arm: 1,
    environment: Callable[[str, Path], Mapping[str, str]] = lambda arm, folder: {},
) -> None:
    """Run each of `arguments.arms` in turn and print its `columns`.

    Args:
        processes: of an arm.
        environment: what an arm's processes find in theirs beside this one's; it may write into their folder.
    """
    results = {}
    for arm in arguments.arms:
        began = time.perf_counter()
        results[arm] = _launch(arm, arguments.limit, processes(arm), environment)
        Path(arguments.json).write_text(json.dumps({"arguments": vars(arguments), "arms": results}, indent=1))
        took = time.perf_counter() - began
        if isinstance(results[arm], str):
            print(f"{arm} ({took:.0f} s) failed:\n{results[arm]}", flush=True)
            continue
        numbers = "  ".join(f"{name} {results[arm][name]:.3g}" for name in columns)
        print(f"{arguments.shape} {arm} ({took:.0f} s): {numbers}", flush=True)


def end_arm(arguments: argparse.Namespace, result: Mapping[str, float] | None) -> None:
    """End this process of an arm; one of them has its `result`."""
    if result is not None:
        (Path(arguments.folder) / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # gloo's and NCCL's threads are not worth waiting for


def _launch(arm: str, limit: float, processes: int, environment) -> dict[str, float] | str:
    """What the arm measured, or its last words."""
    with tempfile.TemporaryDirectory() as folder:
        # One process, too, or the Trainer would want every visible GPU for itself.
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
        command += [*sys.argv, "--arm", arm, "--folder", folder]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment(arm, Path(folder))},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return f"took more than {limit:.0f} s: {(error.stdout or b'')[-3000:]!r}"
        result = Path(folder) / "result.json"
        return json.loads(result.read_text()) if result.is_file() else done.stdout[-6000:]


# --- in a process of an arm ---------------------------------------------------------------------------------------


def step_clock(seconds: list[float]):
    """A callback that notes the seconds of each optimizer step."""
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.began)

    return StepClock()


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def prompts(words: int, vocab: int):
    """A dataset of 1024 prompts of `words` words of `word_tokenizer`."""
    from datasets import Dataset

    rows = [" ".join(f"t{3 + (97 * row + 31 * word) % (vocab - 3)}" for word in range(words)) for row in range(1024)]
    return Dataset.from_dict({"prompt": rows})


def first_token_reward(completion_ids, **kwargs):
    return [ids[0] % 7 / 6 for ids in completion_ids]
