"""Locks that a killed compilation has left behind.

DeepSpeed compiles its operators when they are first used. `torch` guards each of them with a lock file, which it waits
for without an end, and which stays when the process that compiles is killed.

Guarantees: nothing is deleted; a compilation that goes on is not reported.
"""

import logging
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from accelerate.utils import parse_flag_from_env

LOCK = "lock"
QUIET = 900.0  # seconds without a new file in a folder; DeepSpeed's slowest operators take a few minutes

logger = logging.getLogger(__name__)


def is_launched_with_deepspeed() -> bool:
    return bool(parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"))


def warn_of_stale_locks() -> None:
    """Warn of locks whose folder has not changed for `QUIET` seconds."""
    stale = sorted(str(lock) for lock in _locks() if time.time() - _changed(lock.parent) > QUIET)
    if stale:
        names = shlex.join(stale)
        logger.warning(
            f"A compilation that was killed has left {names}, which DeepSpeed would wait for without an end. If the "
            f"run does not go on, stop it, delete what was left (rm {names}), and start it again."
        )


def _locks() -> Iterator[Path]:
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(get_default_build_root()).glob(f"*/*/{LOCK}") if root is None else Path(root).glob(f"*/{LOCK}")


def _changed(folder: Path) -> float:
    """When a file of `folder` was last written, as `time.time()` counts."""
    try:
        return max(file.stat().st_mtime for file in folder.iterdir())
    except (OSError, ValueError):  # the compilation has ended meanwhile, or this user may not look at it
        return time.time()
