"""`ReportedRun`: what a run left in its folder, as the report shows it.

Guarantees: only reads; a file that is missing leaves its part of the report empty; of a resumed run, the time between
two processes is left out.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_a3po.config import A3POConfig
from trl_a3po.report.history import read_history
from trl_a3po.report.recorded_settings import recorded_settings
from trl_a3po.report.rollout_log import NAME as ROLLOUTS
from trl_a3po.report.timeline import NAME as TIMELINE
from trl_a3po.report.timeline import read_timeline

Lines = list[dict[str, Any]]

TIMES = ("time", "began", "ended", "submitted", "finished", "scoring", "scored")
PHASES = {  # of a group: from, to
    "in the engine": ("submitted", "finished"),
    "in line for rewards": ("finished", "scoring"),
    "rewards": ("scoring", "scored"),
    "ready, not taken": ("scored", "ended"),
}


@dataclass(frozen=True)
class ReportedRun:
    """One run.

    Args:
        name: in the report.
        lines: of its timeline, empty if there is none.
        history: what it logged, as `read_history` returns it.
        rollouts: the lines `rollout` of `rollouts.jsonl`, empty if there is none.
        findings: what `trl-a3po doctor` says about it.
    """

    name: str
    lines: Lines
    history: Lines
    rollouts: Lines
    findings: Sequence[str] = field(default_factory=tuple)

    def of_kind(self, kind: str) -> Lines:
        """The lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def steps(self) -> Lines:
        """The entries of the history that logged training."""
        return [entry for entry in self.history if "step" in entry and "reward" in entry]

    @property
    def start(self) -> dict[str, Any]:
        """The newest line `start`, empty if there is none."""
        starts = self.of_kind("start")
        return starts[-1] if starts else {}

    @property
    def seconds(self) -> float:
        """How long it took, from the first to the last thing that is known of it."""
        times = [line[name] for line in self.lines for name in ("time", "began", "ended") if line.get(name)]
        return max(times) - min(times) if times else 0.0

    @property
    def outcomes(self) -> dict[str, int]:
        """Outcome -> number of attempts at a prompt."""
        return dict(Counter(str(line["outcome"]) for line in self.of_kind("group")).most_common())

    @property
    def warnings(self) -> list[str]:
        """Each warning once."""
        return list(dict.fromkeys(str(line["text"]) for line in self.of_kind("warning")))

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, empty for a run of a version that did not record them."""
        settings: dict[str, Any] = self.start.get("settings", {})
        return settings

    @property
    def changed_settings(self) -> dict[str, Any]:
        """The settings that are not the defaults of `A3POConfig`."""
        with warnings.catch_warnings(action="ignore"):  # of TRL, about its own defaults
            defaults = recorded_settings(A3POConfig("", report_to="none"))
        return {name: value for name, value in self.settings.items() if value != defaults.get(name)}


def read_run(name: str, run: Path, findings: Sequence[str] = ()) -> ReportedRun:
    """
    Args:
        run: the run's `output_dir`, or one of the files that `read_history` takes.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: a file is not what its name says.
    """
    lines, rollouts = run / TIMELINE, run / ROLLOUTS
    return ReportedRun(
        name,
        without_pauses(read_timeline(lines)) if lines.is_file() else [],
        read_history(run),
        read_timeline(rollouts, "rollout") if rollouts.is_file() else [],
        tuple(findings),
    )


def without_pauses(lines: Lines) -> Lines:
    """The lines with the times of each process moved to where the process before it ended."""
    moved: Lines = []
    pause = last = 0.0
    for line in lines:
        if line["kind"] == "start" and moved:
            pause = max(0.0, line["time"] - last)
        line = {name: value - pause if name in TIMES and value else value for name, value in line.items()}
        last = max([last, *(line[name] for name in TIMES if line.get(name))])
        moved.append(line)
    return moved
