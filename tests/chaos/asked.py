"""What the reward function, the dataset and the servers of a chaotic run do wrong, once, when a file asks for it.

Imports nothing heavy: a reward worker that is started again imports this module.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path


class Reward:
    """Scores, and misbehaves when it is asked to."""

    __name__ = "reward"

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, completion_ids, **kwargs):
        return misbehave_in_reward(self.folder, [sum(ids) % 11 / 10 for ids in completion_ids])


def _asked(folder: Path, what: str) -> str | None:
    """What is asked for, once."""
    path = folder / f"{what}.fault"
    try:
        name = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return None
    return name or None


def misbehave_in_reward(folder: Path, values: list[float]) -> list[float]:
    match _asked(folder, "reward"):
        case "raise":
            raise KeyError("gold")
        case "memory":
            raise MemoryError
        case "nan":
            return [float("nan"), *values[1:]]
        case "inf":
            return [float("inf"), *values[1:]]
        case "short":
            return values[:-1]
        case "hang":
            time.sleep(3600)
        case "lock":
            max(itertools.repeat(1))
        case "garbage":
            os.write(int(sys.argv[1]), b"<html>502 Bad gateway</html>")
            time.sleep(3600)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "child":
            if os.fork():
                os._exit(3)
            time.sleep(3600)
    return values


def misbehave_in_dataset(folder: Path) -> None:
    if _asked(folder, "dataset") is not None:
        raise OSError(5, "Input/output error")


def misbehave_in_server(folder: Path, server) -> None:
    if (name := _asked(folder, "server")) is not None:
        server.faults.append(name)
