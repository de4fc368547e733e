"""An environment that a process of its own can import soon: this module imports nothing that takes long."""

import os
import signal
from pathlib import Path
from typing import ClassVar


class Apart:
    """An environment that writes what happens to it into a file, and dies at the first `step` of its class if it is
    told to."""

    folder: ClassVar[str] = ""
    dies: ClassVar[bool] = False

    def reset(self, number, **row):
        self.calls = 0
        self._note("reset")
        return f" {number}"

    def step(self, k: int) -> int:
        """Does a step.

        Args:
            k: a number

        Returns:
            the number of calls
        """
        self.calls += 1
        died = Path(self.folder, "died")
        if self.dies and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.calls

    def get_reward(self):
        return float(self.calls)

    def close(self):
        self._note("close")

    def _note(self, what):
        with open(Path(self.folder, str(os.getpid())), "a") as file:
            file.write(f"{what}\n")
