"""Shared by the benchmarks that compare several runs, called arms, each of which torchrun starts in separate
processes.

Guarantees: an arm that fails or times out does not affect the others; its report holds the steps measured before that,
marked as cut; after every arm the numbers so far are in the JSON file, and beside it, in `NAME.timelines.tar.gz`, the
timeline of each arm that has written one, for `trl-a3po plan --run ARM`. A benchmark parses its arguments with
`add_arguments`. Where `arguments.arm` is set, the process trains, with `step_notes` among the callbacks, and passes
its results to `end_arm`; otherwise it calls `run_arms`.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

RESULT, NOTES, OUTPUT = "result.json", "notes.json", "output.txt"  # in the folder of an arm
TIMELINE = "timeline.jsonl"  # in the output_dir of a run
_OUTPUT_SHOWN = 4000  # characters of the output of an arm
_END_TIMEOUT = 60.0  # seconds; the launcher needs 30 to kill processes that ignore its signal


def add_arguments(parser: argparse.ArgumentParser, *, arms: Sequence[str], timeout: float, json: str) -> None:
    """Add the arguments of `run_arms`, with these defaults."""
    parser.add_argument("--arms", nargs="+", default=arms)
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds an arm may take, its start included")
    parser.add_argument("--json", default=json, help="file to write the numbers to")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # set in the processes of an arm
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
        processes: number of processes of an arm; 0 for one process without `torchrun`.
        environment: environment variables for the processes of an arm; the function may write into their folder.
        folders: where the folder of an arm is created, which is removed after it; by default where temporary files
        are.
    """
    results: dict[str, dict[str, float | str]] = {}
    timelines: dict[str, bytes] = {}
    for arm in arguments.arms:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=folders, ignore_cleanup_errors=True) as folder:
            why = _launch(arm, arguments.timeout, processes(arm), environment(arm, Path(folder)), Path(folder))
            results[arm] = _read(Path(folder) / (NOTES if why else RESULT))
            for timeline in Path(folder).rglob(TIMELINE):
                timelines[arm] = timeline.read_bytes()
        took, head = time.perf_counter() - began, f"{arguments.shape} {arm}"
        if results[arm]:
            numbers = "  ".join(f"{name} {results[arm][name]:.3g}" for name in columns)
            cut = f", CUT after {results[arm]['steps']} measured steps" if why else ""
            print(f"{head} ({took:.0f} s{cut}): {numbers}", flush=True)
        if why:
            results[arm]["cut"] = why
            print(f"{head} ({took:.0f} s) {why}", flush=True)
        Path(arguments.json).write_text(json.dumps({"arguments": vars(arguments), "arms": results}, indent=1))
        _pack(timelines, Path(arguments.json).with_suffix(".timelines.tar.gz"))


def _launch(arm: str, timeout: float, processes: int, environment: Mapping[str, str], folder: Path) -> str | None:
    """Run an arm. Returns why it has no result, with the end of its output; `None` if it has a result."""
    # Also for a single process: the Trainer would otherwise use every visible GPU.
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"] if processes else []
    command = [sys.executable, *launcher, *sys.argv, "--arm", arm, "--folder", str(folder)]
    why = "failed"
    with (folder / OUTPUT).open("wb") as output:
        running = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
        try:
            running.wait(timeout)
        except subprocess.TimeoutExpired:
            why = f"took more than {timeout:.0f} s"
        finally:
            text = (folder / OUTPUT).read_text(errors="replace")  # before the launcher reports that it was terminated
            _end(running)
    if (folder / RESULT).is_file():
        return None
    return f"{why}; its output ends with:\n{text[-_OUTPUT_SHOWN:].strip()}"


def _end(launcher: subprocess.Popen) -> None:
    """Terminate the launcher, which then ends its processes. If it were killed, they would stay on the GPUs of the
    next arm."""
    launcher.terminate()
    try:
        launcher.wait(_END_TIMEOUT)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _pack(timelines: Mapping[str, bytes], file: Path) -> None:
    """Write the timeline of each arm as `ARM/timeline.jsonl`, where that is an `output_dir` for whatever reads one."""
    with tarfile.open(file, "w:gz") as archive:
        for arm, timeline in timelines.items():
            member = tarfile.TarInfo(f"{arm}/{TIMELINE}")
            member.size = len(timeline)
            archive.addfile(member, io.BytesIO(timeline))


def _read(file: Path) -> dict[str, float | str]:
    return json.loads(file.read_text()) if file.is_file() else {}


# --- in a process of an arm ---------------------------------------------------------------------------------------


def end_arm(arguments: argparse.Namespace, result: Mapping[str, float] | None) -> None:
    """End this process of an arm. One of the processes passes the `result`."""
    if result is not None:
        _write(Path(arguments.folder) / RESULT, result)
    sys.stdout.flush()
    os._exit(0)  # gloo's and NCCL's threads are not worth waiting for


def step_notes(arguments: argparse.Namespace, warm: int, measured: Callable[[], Mapping[str, float]]):
    """A callback that writes what is `measured` so far after each optimizer step except the first `warm`, for the
    report of an arm that is cut. Needs `logging_steps=1`; one of the numbers must be `steps`, the count of measured
    steps."""
    from transformers import TrainerCallback

    class StepNotes(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):  # after the log history has the numbers of the step
            if state.is_world_process_zero and state.global_step > warm:
                _write(Path(arguments.folder) / NOTES, measured())

    return StepNotes()


def step_clock(seconds: list[float]):
    """A callback that appends the seconds of each optimizer step to `seconds`, from the end of the one before: some
    trainers prepare a batch, or log, between two steps."""
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        began: float | None = None

        def on_step_begin(self, *args, **kwargs):
            if self.began is None:  # the first step
                self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append(now - self.began)
            self.began = now

    return StepClock()


def _write(file: Path, numbers: Mapping[str, float]) -> None:
    whole = file.with_suffix(".new")  # this process may be ended at any time
    whole.write_text(json.dumps(numbers))
    whole.replace(file)


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def prompts(words: int, vocab: int):
    """A dataset of 1024 prompts, each of `words` words of `word_tokenizer`."""
    from datasets import Dataset

    rows = [" ".join(f"t{3 + (97 * row + 31 * word) % (vocab - 3)}" for word in range(words)) for row in range(1024)]
    return Dataset.from_dict({"prompt": rows})


def first_token_reward(completion_ids, **kwargs):
    return [ids[0] % 7 / 6 for ids in completion_ids]
