"""What happened when in a run, as JSON lines in `output_dir/timeline.jsonl`, for pandas and for plots.

Guarantees: a line is only ever appended; every attempt at a prompt that ended has one line, so lines count what the
outcomes of the queue count; lines are kept in memory between two optimizer steps and written by the main thread of the
main process; a file that cannot be written costs the timeline, with a warning, and never the run.

All times are in seconds since 1970; what a run has no number for is `null`. The kinds of lines:

- `start`: a process begins to train `run`, a name that a resumed run keeps, at `version`, `resumed` or not, with
  `groups_per_batch`, `num_generations`, `max_staleness` and `schedule`;
- `group`: an attempt at a prompt ended (see `trl_a3po.rollout.outcomes.AttemptRecord`);
- `engine_start`, `publish`, `take`, `evaluation`, `step`: from `began` to `ended`, at `version` (of a step: the one it
  made). A take lasts as long as the trainer waits; the time of a step that is in no other line is training;
- `log`: in `logged` what was logged, under names that are the user's too, as in the Trainer's `log_history`;
- `checkpoint`: of `version`, being saved; `end`: training stopped.
"""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trl_a3po.rollout.outcomes import AttemptRecord

logger = logging.getLogger(__name__)

NAME = "timeline.jsonl"
EPOCH = time.time() - time.monotonic()  # of the monotonic clock, which nobody sets back
TIMES = ("submitted", "finished", "scoring", "scored", "ended")  # of an attempt, in the queue's clock


class Timeline:
    """Writes the lines of one `train()` call.

    Args:
        path: the file, whose folder is made.
        facts: of the line `start`.
    """

    def __init__(self, path: Path, **facts: Any):
        self._path = path
        self._lines: deque[str] = deque()  # of any thread
        self._works, self._began = True, False
        self.write("start", **facts)

    @staticmethod
    def now() -> float:
        """Seconds since 1970."""
        return EPOCH + time.monotonic()

    def attempt(self, attempt: AttemptRecord) -> None:
        """An attempt ended. Any thread; does not touch the file."""
        facts = asdict(attempt)
        for name in TIMES:
            if facts[name] is not None:
                facts[name] += EPOCH
        self._append("group", facts)

    def write(self, kind: str, /, **facts: Any) -> None:
        """A line of this kind, now."""
        self._append(kind, {"time": self.now(), **facts})

    def log(self, logged: dict[str, Any]) -> None:
        """A line of what was logged, under whatever names."""
        self.write("log", logged=logged)

    @contextmanager
    def span(self, kind: str, /, **facts: Any) -> Iterator[None]:
        """Inside, something of this kind happens; what raises leaves no line."""
        began = self.now()
        yield
        self.lasted(kind, began, **facts)

    def lasted(self, kind: str, began: float, /, **facts: Any) -> None:
        """A line of something that lasted from `began` until now."""
        self._append(kind, {"began": began, "ended": self.now(), **facts})

    def flush(self) -> None:
        """Append what has happened to the file. Main thread only."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if not lines or not self._works:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines([*self._end_of_cut_line(), *lines])
        except OSError as error:
            self._ends(error)

    def close(self) -> None:
        """The run stopped; idempotent."""
        if self._works:
            self.write("end")
            self.flush()
            self._works = False

    def _ends(self, error: Exception) -> None:
        self._works = False
        logger.warning("The timeline %s cannot be written any more and ends here: %s", self._path, error)

    def _end_of_cut_line(self) -> list[str]:
        """A newline where a kill has cut the last line of the process before."""
        if self._began:
            return []
        self._began = True
        content = self._path.read_bytes()[-1:]
        return ["\n"] if content not in (b"", b"\n") else []

    def _append(self, kind: str, facts: dict[str, Any]) -> None:
        try:
            self._lines.append(json.dumps(_plain({"kind": kind, **facts}), default=str) + "\n")
        except (TypeError, ValueError) as error:
            self._ends(error)


def read_timeline(run: str | Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of a run, in the order they were written: `pandas.DataFrame(read_timeline(run, "group"))`.

    Of a run that was resumed, what an earlier process did after the checkpoint that the next one went on from is left
    out, so that every prompt of an epoch was trained once; of several runs in one folder, all but the one that went on
    last.

    Args:
        run: the run's `output_dir`, or its `timeline.jsonl`.
        kinds: those to read; all by default.

    Raises:
        FileNotFoundError: there is no timeline.
        ValueError: a line other than the last, which a kill may have cut, is not JSON.
    """
    path = Path(run)
    path = path / NAME if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{run} holds no {NAME}: name the output_dir of a run.")
    lineage: list[dict[str, Any]] = []
    name: str | None = None  # of the run
    lineages: dict[str | None, list[dict[str, Any]]] = {}
    saved: dict[tuple[str | None, int], tuple[list[dict[str, Any]], int]] = {}  # a run's checkpoints, and lines so far
    for line in _lines(path):
        if line["kind"] == "start":
            name, known = line.get("run"), []
            if line["resumed"]:  # all of the run where no line says when the checkpoint was saved
                lines, count = saved.get((name, line["version"]), (lineages.get(name, []), None))
                known = lines[:count]
            lineage = lineages[name] = known
        lineage.append(line)
        if line["kind"] == "checkpoint":
            saved[name, line["version"]] = lineage, len(lineage)
    return [line for line in lineage if not kinds or line["kind"] in kinds]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            cut_by_a_kill = number == len(lines) or lines[number].startswith('{"kind": "start"')
            if not cut_by_a_kill:
                raise ValueError(f"Line {number} of {path} is not JSON ({error}): name a {NAME}.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
