"""What the benchmarks share that compare several runs, called arms: each in processes of its own, by torchrun.

Guarantees: an arm that fails or takes too long costs no other one, and is reported by the steps it had measured until
then, as one that was cut; after every arm the numbers so far are in the JSON file. A benchmark parses its arguments
with `add_arguments`; where `arguments.arm` is set it trains, with `step_notes` among the callbacks, and hands what it
measured to `end_arm`; elsewhere it calls `run_arms`.
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

RESULT, NOTES, OUTPUT = "result.json", "notes.json", "output.txt"  # in the folder of an arm
_SHOWN = 4000  # characters of its output
_GRACE = 60.0  # seconds; its launcher needs 30 to end processes that do not want to


def add_arguments(parser: argparse.ArgumentParser, *, arms: Sequence[str], limit: float, json: str) -> None:
    """The arguments of `run_arms`, with their defaults."""
    parser.add_argument("--arms", nargs="+", default=arms)
    parser.add_argument("--limit", type=float, default=limit, help="seconds an arm may take, with its start")
    parser.add_argument("--json", default=json, help="write the numbers here")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # of one process of an arm
    parser.add_argument("--folder", help=argparse.SUPPRESS)


def run_arms(
    arguments: argparse.Namespace,
    columns: Sequence[str],
    *,
    processes: Callable[[str], int] = lambda arm: 1,
    environment: Callable[[str, Path], Mapping[str, str]] = lambda arm, folder: {},
    folders: str | None = None,
) -> None:
    """Run each of `arguments.arms` in turn and print its `columns`.

    Args:
        processes: of an arm.
        environment: what an arm's processes find in theirs beside this one's; it may write into their folder.
        folders: where an arm gets its folder, which is removed after it; `None`: where temporary files are.
    """
    results: dict[str, dict[str, float | str]] = {}
    for arm in arguments.arms:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folders, ignore_cleanup_errors=True) as folder:
            why = _launch(arm, arguments.limit, processes(arm), environment(arm, Path(folder)), Path(folder))
            results[arm] = _read(Path(folder) / (NOTES if why else RESULT))
        took, head = time.perf_counter() - began, f"{arguments.shape} {arm}"
        if results[arm]:
            numbers = "  ".join(f"{name} {results[arm][name]:.3g}" for name in columns)
            cut = f", CUT after {results[arm]['steps']} measured steps" if why else ""
            print(f"{head} ({took:.0f} s{cut}): {numbers}", flush=True)
        if why:
            results[arm]["cut"] = why
            print(f"{head} ({took:.0f} s) {why}", flush=True)
        Path(arguments.json).write_text(json.dumps({"arguments": vars(arguments), "arms": results}, indent=1))


def _launch(arm: str, limit: float, processes: int, environment: Mapping[str, str], folder: Path) -> str | None:
    """Run an arm. Returns why it has no result, with its last words; `None` if it has one."""
    # One process, too, or the Trainer would want every visible GPU for itself.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    command += [*sys.argv, "--arm", arm, "--folder", str(folder)]
    why = "failed"
    with (folder / OUTPUT).open("wb") as output:
        launcher = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
        try:
            launcher.wait(limit)
        except subprocess.TimeoutExpired:
            why = f"took more than {limit:.0f} s"
        finally:
            words = (folder / OUTPUT).read_text(errors="replace")  # before the launcher says that it was ended
            _end(launcher)
    if (folder / RESULT).is_file():
        return None
    return f"{why}; its output ends with:\n{words[-_SHOWN:].strip()}"


def _end(launcher: subprocess.Popen) -> None:
    """Asked to, it ends its processes; killed, it would leave them on the GPUs of the next arm."""
    launcher.terminate()
    try:
        launcher.wait(_GRACE)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _read(file: Path) -> dict[str, float | str]:
    return json.loads(file.read_text()) if file.is_file() else {}


# --- in a process of an arm ---------------------------------------------------------------------------------------


def end_arm(arguments: argparse.Namespace, result: Mapping[str, float] | None) -> None:
    """End this process of an arm; one of them has its `result`."""
    if result is not None:
        _write(Path(arguments.folder) / RESULT, result)
    sys.stdout.flush()
    os._exit(0)  # gloo's and NCCL's threads are not worth waiting for


def step_notes(arguments: argparse.Namespace, warm: int, measured: Callable[[], Mapping[str, float]]):
    """A callback that notes what is `measured` so far after each optimizer step but the first `warm`: what is left of
    an arm that is cut. With `logging_steps=1`; among the numbers are `steps`, those that were measured."""
    from transformers import TrainerCallback

    class StepNotes(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):  # after the step's numbers have joined the history
            if state.is_world_process_zero and state.global_step > warm:
                _write(Path(arguments.folder) / NOTES, measured())

    return StepNotes()


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


def _write(file: Path, numbers: Mapping[str, float]) -> None:
    whole = file.with_suffix(".new")  # this process may be ended at any time
    whole.write_text(json.dumps(numbers))
    whole.replace(file)


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
