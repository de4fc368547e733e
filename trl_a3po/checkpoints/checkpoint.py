"""Checkpoint folders. A folder is a valid checkpoint only when its marker, which is written last, says so.

Guarantees:
- every file written here appears whole under its name, or not at all;
- the marker lists every file of the folder with its size, and the files written here with their SHA-256. It is written
  after all of them are on the disk. A folder whose writing was cut short, or that has lost or shortened a file later,
  is never taken for valid; a file of ours that has changed later is found by `why_damaged`;
- the marker says which run wrote the folder, and when. The time in it is later than in every marker that was in the
  `output_dir` before, whatever the clock says;
- JSON and safetensors are the only formats.
"""

import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
import torch

STATE = "a3po_state.json"
GROUPS = "a3po_groups.safetensors"
MARKER = "a3po_complete.json"
FORMAT = 4
LEAST_LATER = 0.001  # seconds between the times of two markers


def batch_file(rank: int) -> str:
    """Name of the file with the slices of the unfinished generation batch of process `rank`."""
    return f"a3po_batch_{rank}.safetensors"


# --- writing ------------------------------------------------------------------------------------------------------


def begin(folder: Path) -> None:
    """Begin to write a checkpoint into `folder`. The folder is not valid from now on, even if it was before."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).unlink(missing_ok=True)
    _sync(folder)
    for left in (*folder.glob("a3po_batch_*.safetensors"), *folder.glob(".a3po_*.partial")):
        left.unlink(missing_ok=True)


def write_json(path: Path, values: Any) -> None:
    """Write JSON; NaN is written as `NaN`.

    Raises:
        TypeError: a value is neither JSON nor a number of numpy or torch.
    """
    _write(path, json.dumps(values, default=_as_json).encode())


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    _write(path, safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def complete(folder: Path, policy_version: int, run: str | None = None) -> None:
    """Make `folder` a valid checkpoint of `run`: first every file reaches the disk, then the marker is written."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in [*files, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(path)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    written = max([time.time(), *(written_at(path) + LEAST_LATER for path in checkpoints(folder.parent))])
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in files if _is_our_name(path.name)}
    marker: dict[str, Any] = {"format": FORMAT, "policy_version": policy_version, "run": run, "written": written}
    marker |= {"files": sizes, "sha256": digests}
    write_json(folder / MARKER, marker)


# --- reading ------------------------------------------------------------------------------------------------------


def is_ours(folder: Path) -> bool:
    """Whether a checkpoint with a queue was begun in `folder`."""
    return any(folder.glob("a3po_*")) or any(folder.glob(".a3po_*"))


def why_invalid(folder: Path) -> str | None:
    """Why `folder` is not a valid checkpoint, as a predicate such as "does not exist"; `None` if it is valid."""
    try:
        content = (folder / MARKER).read_bytes()
        found = msgspec.json.decode(content, type=_MarkerFormat).format
        marker = msgspec.json.decode(content, type=_Marker) if found == FORMAT else _Marker()
    except FileNotFoundError:
        if not folder.is_dir():
            return "does not exist"
        return f"has no {MARKER}: " + ("writing it was cut short" if is_ours(folder) else "no A3POTrainer wrote it")
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return f"has a {MARKER} that cannot be read"
    if found != FORMAT:
        return f"has format {found}, and this version of trl_a3po reads format {FORMAT}"
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    for name, size in marker.files.items():
        if name not in sizes:
            return f"lacks {name}"
        if sizes[name] != size:
            return f"has a {name} of {sizes[name]} bytes instead of {size}"
    return None


def why_damaged(folder: Path) -> str | None:
    """Which of our files of the valid checkpoint `folder` is not as it was written, as a predicate; `None` if all are.
    Reads these files whole. A checkpoint of an earlier version of this package has no digests to compare."""
    marker = _marker(folder)
    for name, digest in marker.sha256.items():
        if name not in marker.files or _digest(folder / name) != digest:
            return f"has a damaged {name}: its content has changed since it was written"
    return None


def run_of(folder: Path) -> str | None:
    """The run that wrote the valid checkpoint `folder`; `None` if its marker names no run."""
    return _marker(folder).run


def written_at(folder: Path) -> float:
    """When the valid checkpoint `folder` was written, by its marker; 0 if its marker does not say."""
    return _marker(folder).written


def checkpoints(output_dir: Path) -> list[Path]:
    """The folders `checkpoint-<step>` in `output_dir`, ordered by step."""
    found = (path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name))
    return sorted((path for path in found if path.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    """The optimizer step in the name of a checkpoint folder."""
    return int(folder.name.removeprefix("checkpoint-"))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


class _MarkerFormat(msgspec.Struct):
    format: int


class _Marker(msgspec.Struct):
    """What this version reads of a marker."""

    files: dict[str, int] = {}
    run: str | None = None
    written: float = 0.0
    sha256: dict[str, str] = {}


def _marker(folder: Path) -> _Marker:
    """The marker of `folder`, empty if it cannot be read: `why_invalid` says why."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=_Marker)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return _Marker()


def _is_our_name(name: str) -> bool:
    return name.startswith("a3po_")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- files --------------------------------------------------------------------------------------------------------


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
    raise TypeError(f"a {type(value).__name__} ({repr(value)[:80]}) is neither a number, a string, a list nor a dict")
