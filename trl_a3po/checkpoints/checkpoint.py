"""Checkpoint folders. A folder is a valid checkpoint only when its marker, which is written last, says so.

Guarantees:
- every file written here appears whole under its name, or not at all;
- the marker lists every file that was written for the checkpoint with its size and a digest: SHA-256 for the files
  written here, and `contents.py` for those of the `Trainer`. It is written after all of them are on the disk. A folder
  whose writing was cut short, or that has lost or shortened a file later, is never taken for valid; a file that has
  changed later, or that comes from another checkpoint, is found by `why_damaged`. The marker does not vouch for what
  lay in the folder before;
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

from trl_a3po.checkpoints.contents import digest_of_contents

STATE = "a3po_state.json"
GROUPS = "a3po_groups.safetensors"
MARKER = "a3po_complete.json"
FORMAT = 4
LEAST_LATER = 0.001  # seconds between the times of two markers


def batch_file(rank: int) -> str:
    """Name of the file with the slices of the unfinished generation batch of process `rank`."""
    return f"a3po_batch_{rank}.safetensors"


# --- writing ------------------------------------------------------------------------------------------------------


Stamps = dict[str, tuple[int, int, int]]
"""For each file of a folder, numbers that change when the file is written."""


def begin(folder: Path) -> Stamps:
    """Begin to write a checkpoint into `folder`. The folder is not valid from now on, even if it was before. Returns
    the stamps of the files that are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).unlink(missing_ok=True)
    _sync(folder)
    for left in (*folder.glob("a3po_batch_*.safetensors"), *folder.glob(".a3po_*.partial")):
        left.unlink(missing_ok=True)
    return _stamps(folder)


def write_json(path: Path, values: Any) -> None:
    """Write JSON; NaN is written as `NaN`.

    Raises:
        TypeError: a value is neither JSON nor a number of numpy or torch.
    """
    _write(path, json.dumps(values, default=_as_json).encode())


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    _write(path, safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def complete(folder: Path, policy_version: int, run: str | None = None, before: Stamps | None = None) -> None:
    """Make `folder` a valid checkpoint of `run`: first every file reaches the disk, then the marker is written.

    Args:
        folder: the folder, in which everything else has been written.
        policy_version: optimizer steps so far.
        run: the name of the run.
        before: what `begin` returned; files that have not been written since then do not belong to the checkpoint.
    """
    stamps, before = _stamps(folder), before or {}
    files = {name: folder / name for name, stamp in sorted(stamps.items()) if before.get(name) != stamp}
    for path in [*files.values(), *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(path)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    written = max([time.time(), *(written_at(path) + LEAST_LATER for path in checkpoints(folder.parent))])
    marker: dict[str, Any] = {"format": FORMAT, "policy_version": policy_version, "run": run, "written": written}
    ours = {name: _digest(path) for name, path in files.items() if _is_our_name(path.name)}
    others = {name: digest_of_contents(path) for name, path in files.items() if name not in ours}
    write_json(folder / MARKER, marker | {"files": sizes, "sha256": ours, "contents": others})


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
    """Which file of the valid checkpoint `folder` is not as it was written, as a predicate; `None` if all are. Reads
    our files whole. A checkpoint of an earlier version of this package has no digests to compare."""
    marker = _marker(folder)
    digests = [(name, _digest, digest) for name, digest in marker.sha256.items()]
    digests += [(name, digest_of_contents, digest) for name, digest in marker.contents.items()]
    for name, compute, digest in digests:
        if name not in marker.files or compute(folder / name) != digest:
            return f"has a damaged {name}: its content has changed since it was written"
    others = sorted(path.name for path in folder.glob("a3po_*") if path.name not in (*marker.files, MARKER))
    return f"has a {others[0]} that does not belong to it" if others else None


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
    contents: dict[str, str] = {}


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


def _stamps(folder: Path) -> Stamps:
    found = ((path, path.stat()) for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): (stat.st_mtime_ns, stat.st_ino, stat.st_size) for path, stat in found}


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
