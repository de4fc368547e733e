"""`trl-a3po doctor RUN`: what went wrong in a run, from its timeline, its checkpoints, or the text that it printed.

Guarantees: only reads; each finding is a sentence that says what to set or do.
"""

import inspect
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl_a3po.checkpoints import checkpoint
from trl_a3po.cli.beside_measured import beside_measured
from trl_a3po.cli.log_errors import OURS, LoggedError, came_to_its_end, last_error
from trl_a3po.report.left_out import rows_left_out
from trl_a3po.report.run_process import how_it_was_left, is_gone, is_running
from trl_a3po.report.timeline import NAME, read_timeline
from trl_a3po.report.verdict import verdict_of
from trl_a3po.rollout.left_out import reasons_in_words, row_in_words

KNOWN = {
    "OutOfMemoryError": "a GPU has no memory left. Lower per_device_train_batch_size and raise "
    "gradient_accumulation_steps, set gradient_checkpointing=True, or give the engine a GPU of its own "
    "(engine_device). The plan (dry_run=True) says what needs how much memory.",
    "ModuleNotFoundError": "the environment of this process lacks the module: install it there.",
    "KeyboardInterrupt": "somebody pressed Ctrl-C, or interrupted the notebook's cell. Nothing has failed; the run "
    "goes on with resume_from_checkpoint=True.",
}
"""Errors of other libraries, and what to do about them."""
MOSTLY = 0.5  # share of a number, above which it is named


def diagnose(path: Path) -> list[str]:
    """The findings about a run's folder, a checkpoint, a `timeline.jsonl`, or a file with what a run printed.

    Raises:
        FileNotFoundError: there is none of these at `path`.
        ValueError: the timeline is not one.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give a recipe, a run's output_dir, a checkpoint or a log.")
    if path.is_file() and path.suffix != ".jsonl":
        return list(_of_text(path.read_text(encoding="utf-8", errors="replace")))
    if path.is_dir() and (checkpoint.is_ours(path) or path.name.startswith("checkpoint-")):
        return list(_of_checkpoints([path]))
    timeline = path / NAME if path.is_dir() else path
    findings = list(_of_checkpoints(checkpoint.checkpoints(path))) if path.is_dir() else []
    if not findings and not timeline.is_file():
        raise FileNotFoundError(
            f"{path} holds neither a run ({NAME}) nor a checkpoint: give a recipe, a run's output_dir, a checkpoint "
            "or a log."
        )
    return [*findings, *(_of_timeline(read_timeline(timeline)) if timeline.is_file() else ())]


def _of_checkpoints(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        problem = checkpoint.why_invalid(folder) or checkpoint.why_damaged(folder)
        yield f"PROBLEM: {folder} {problem}." if problem else f"{folder} is whole and can be resumed."


def _of_text(text: str) -> Iterator[str]:
    """The error that a log ends with, where it was raised, and what is known of it."""
    error = last_error(text)
    if error is None and not text.strip():
        yield "PROBLEM: the log is empty: give what the run printed."
        return
    if error is None and came_to_its_end(text):
        yield "The training in the log came to its end, and no error follows."
        return
    if error is None:
        yield (
            "PROBLEM: the log ends before the training does, and holds no traceback: the process was killed, still "
            "runs, or printed its error elsewhere. Give the output of the process that failed first."
        )
        return
    frame = error.last_frame
    where = "" if frame is None else f" ({'raised below ' * _is_below(error)}{frame})"
    yield f"PROBLEM: {error}{where}"
    yield _known(error) if error.kind is None else f"{error.kind}: {_known(error)}"
    if error.quoted is not None:
        yield f"The worker printed {error.quoted}" + (f" ({error.quoted.frames[-1]})" if error.quoted.frames else "")


def _is_below(error: LoggedError) -> bool:
    """Whether the error was raised in a library that its last frame of interest has called."""
    return bool(error.frames) and error.frames[-1].is_of_a_library


def _known(error: LoggedError) -> str:
    """What to do about an error."""
    if error.kind is None:
        return "The text ends before it says which error this is: give the rest of the output too."
    if error.kind in OURS:
        return " ".join((inspect.getdoc(OURS[error.kind]) or "").split("\n\n")[-1].split())
    if error.kind in KNOWN:
        return KNOWN[error.kind]
    frame = error.last_frame
    if frame is None or _is_below(error):
        where = f"a library raised it, in {error.frames[-1]}" if error.frames else "there is no traceback of it"
        return f"{where}. Look for its message in the library's documentation and issues."
    if not frame.is_ours:
        return "your own code raised it, in the line named above. Correct it, then resume from the last checkpoint."
    if error.kind in ("ValueError", "TypeError"):
        return "trl_a3po refuses a setting, the data or an argument. The message says which one, and what to do."
    return "trl_a3po does not raise this on purpose: report it with the whole traceback and what trl-a3po env prints."


def _of_timeline(lines: list[dict[str, Any]]) -> Iterator[str]:
    kinds = {kind: [line for line in lines if line["kind"] == kind] for kind in ("start", "step", "group", "log")}
    last, steps = lines[-1] if lines else {}, len(kinds["step"])
    process = kinds["start"][-1].get("process") if kinds["start"] else None
    if last.get("kind") != "end" and process is not None and is_running(process):
        yield f"The run has not ended: its process {process['pid']} is still there, {_when(steps)}."
    elif (ending := _of_ending(process, steps, last)) is not None:
        yield f"PROBLEM: {ending}"
    yield from _of_groups(kinds["group"])
    yield from _of_rows(lines)
    if (verdict := verdict_of(lines)) is not None:
        yield verdict.sentence
    if (forecast := beside_measured(lines)) is not None:
        yield forecast
    yield from _of_logs([line["logged"] for line in kinds["log"] if line.get("logged")])


def _of_ending(process: dict[str, Any] | None, steps: int, last: dict[str, Any]) -> str | None:
    """How the run ended after so many steps, if it did not come to its end."""
    ended, error = last.get("kind") == "end", last.get("error")
    if not ended and is_gone(process):
        return how_it_was_left(steps)
    if not ended and not steps:
        return (
            "the run is still starting, or the process was killed before its first optimizer step: its timeline has "
            "no step and no end. What it printed says which."
        )
    if not ended:
        return (
            f"the process was killed after optimizer step {steps}, or it is still running: its timeline has no end. "
            "resume_from_checkpoint=True goes on from its newest checkpoint."
        )
    if error:
        return f"the run ended {_when(steps)} with an error. {error}"
    return None if steps else "the run ended before its first optimizer step: the error is in what it printed."


def _when(steps: int) -> str:
    return f"after optimizer step {steps}" if steps else "before its first optimizer step"


def _of_groups(groups: list[dict[str, Any]]) -> Iterator[str]:
    outcomes = Counter(str(group.get("outcome")) for group in groups)
    for kind, advice in (
        ("failed", "look for the cause in the engine's last output"),
        ("rejected", "if this is more than you expect, correct the reward functions, on_group or reward_timeout"),
    ):
        of_kind = {outcome: count for outcome, count in outcomes.items() if outcome.startswith(f"{kind}: ")}
        if sum(of_kind.values()) > MOSTLY * len(groups):
            worst = max(of_kind, key=of_kind.__getitem__)
            yield f"PROBLEM: {sum(of_kind.values())} of {len(groups)} attempts were {worst}: {advice}."


def _of_rows(lines: list[dict[str, Any]]) -> Iterator[str]:
    """The rows of the data that were left out."""
    counts = rows_left_out(lines)
    if counts:
        last = [line for line in lines if line["kind"] == "left_out"][-1]
        yield (
            f"WARNING: {counts.total()} rows of the data were left out ({reasons_in_words(counts)}). The last one is "
            f"{row_in_words(last['row'], last['dataset_row'])}: {last['text']}"
        )


def _of_logs(logs: list[dict[str, Any]]) -> Iterator[str]:
    for log in logs:
        if any(name in log and _is_nan(log[name]) for name in ("loss", "grad_norm")):
            yield (
                f"PROBLEM: the loss or the gradient is not a number at step {log.get('step')}: lower learning_rate, "
                "set max_grad_norm, or train in bfloat16 instead of float16."
            )
            break
    last: dict[str, Any] = logs[-1] if logs else {}
    if (last.get("frac_reward_zero_std") or 0) > 0.9:
        yield (
            "PROBLEM: in most groups all rewards are equal, so that nothing is learned: give partial rewards, use "
            "easier prompts, raise num_generations, or set drop_zero_variance_groups=True."
        )
    if (last.get("completions/clipped_ratio") or 0) > 0.9:
        yield (
            "PROBLEM: nearly all completions are cut off at max_completion_length, before they come to an answer: "
            "raise max_completion_length, or ask for shorter answers."
        )
    if restarts := last.get("a3po/engine/restarts"):
        yield f"WARNING: the engine died {restarts:g} times and was started again: its output says why."
    if timeouts := last.get("a3po/reward/timeouts"):
        yield f"WARNING: {timeouts:g} groups had a reward that took longer than reward_timeout."


def _is_nan(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))  # a timeline writes NaN as null
