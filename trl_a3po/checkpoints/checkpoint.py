"""Checkpoint folders: valid only when a marker, written last, says so (invariant 10).

Guarantees: every file written here appears whole under its name or not at all; the marker names every file of the
folder with its size and is written after all of them are on the disk, so a folder that was cut short, or lost or
shortened a file later, is never taken for valid; it also says whose run it is and when it was written: later, by its
word, than all that was written into the `output_dir` before, whatever the clock says; JSON and safetensors are the
only formats.
"""

import json
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

logger = logging.getLogger(__name__)

STATE = "a3po_state.json"
GROUPS = "a3po_groups.safetensors"
MARKER = "a3po_complete.json"
FORMAT = 2
LEAST_LATER = 0.001  # seconds


def batch_file(rank: int) -> str:
    """Name of the file with the slices of the batch that process `rank` is in the middle of."""
    return f"a3po_batch_{rank}.safetensors"


# --- writing ------------------------------------------------------------------------------------------------------


def begin(folder: Path) -> None:
    """Open `folder` for a checkpoint: from now on it is not valid, whatever it was."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).unlink(missing_ok=True)
    _sync(folder)
    for left in (*folder.glob("a3po_batch_*.safetensors"), *folder.glob(".a3po_*.partial")):
        left.unlink(missing_ok=True)


def write_json(path: Path, values: Any) -> None:
    """Write JSON; NaN is written as `NaN`.

    Raises:
        TypeError: something in it is neither JSON nor a number of numpy or torch.
    """
    _write(path, json.dumps(values, default=_as_json).encode())


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    _write(path, safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def complete(folder: Path, policy_version: int, run: str | None = None) -> None:
    """Declare `folder` a valid checkpoint of `run`: all that is in it reaches the disk, then the marker is written."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in [*files, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(path)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    before = [_marker(path).get("written", 0.0) for path in checkpoints(folder.parent)]
    written = max([time.time(), *(moment + LEAST_LATER for moment in before)])
    marker = {"format": FORMAT, "policy_version": policy_version, "run": run, "written": written, "files": sizes}
    write_json(folder / MARKER, marker)


# --- reading ------------------------------------------------------------------------------------------------------


def is_ours(folder: Path) -> bool:
    """Whether a checkpoint with a queue was begun in `folder`."""
    return any(folder.glob("a3po_*")) or any(folder.glob(".a3po_*"))


def why_invalid(folder: Path) -> str | None:
    """Why `folder` is not a checkpoint to resume from, as the end of a sentence about it; `None` if it is one."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        found, files = marker["format"], marker["files"]
    except FileNotFoundError:
        if not folder.is_dir():
            return "does not exist"
        return f"has no {MARKER}: " + ("writing it was cut short" if is_ours(folder) else "no A3POTrainer wrote it")
    except (ValueError, KeyError, TypeError):
        return f"has a {MARKER} that cannot be read"
    if found != FORMAT:
        return f"has format {found}, and this version of trl_a3po reads format {FORMAT}"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"lacks {name}"
        if path.stat().st_size != size:
            return f"has a {name} of {path.stat().st_size} bytes instead of {size}"
    return None


def newest_valid(output_dir: Path) -> Path:
    """The valid checkpoint in `output_dir` that was written last, by what the markers say. Warnings name those that
    are not valid, and those of higher steps, of another run or of this one before it went back.

    Raises:
        ValueError: there is none; the message says what is wrong with each that is there.
    """
    found = {folder: why_invalid(folder) for folder in reversed(checkpoints(output_dir))}
    problems = [f"{folder} {problem}" for folder, problem in found.items() if problem is not None]
    valid = [folder for folder, problem in found.items() if problem is None]
    if not valid:
        raise ValueError(
            f"resume_from_checkpoint=True finds no valid checkpoint in output_dir={str(output_dir)!r}: "
            f"{'; '.join(problems) or 'there is none at all'}. Leave it out to start from the beginning, or give the "
            "path of a checkpoint."
        )
    newest = max(valid, key=lambda folder: (_marker(folder).get("written", 0.0), _step(folder)))
    for problem in problems:
        logger.warning("Not resuming from a checkpoint that is not valid: %s.", problem)
    for other in valid:
        if _step(other) > _step(newest):
            logger.warning(
                "Not resuming from %s, which was written before %s, by %s: give its path to go on from it.",
                other,
                newest.name,
                "another run" if run_of(other) != run_of(newest) else "this run before it went back",
            )
    return newest


def run_of(folder: Path) -> str | None:
    """The run that wrote the valid checkpoint `folder`; `None` of one from before runs had names."""
    return _marker(folder).get("run")


def checkpoints(output_dir: Path) -> list[Path]:
    """The folders `checkpoint-<step>` in `output_dir`, by step."""
    found = (path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name))
    return sorted((path for path in found if path.is_dir()), key=_step)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def _marker(folder: Path) -> dict[str, Any]:
    """Nothing where it cannot be read: `why_invalid` says why."""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) else {}


# --- the steps they are made of -----------------------------------------------------------------------------------


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_json(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} ({repr(value)[:80]}) is neither a number, text, a list nor a dict")
