"""What happened when in a run, as JSON lines in `output_dir/timeline.jsonl`, for pandas and for charts.

Guarantees: lines are only appended; every attempt at a prompt that ended has one line, so the lines add up to the
outcomes of the queue; lines are kept in memory between two optimizer steps, and the main thread of the main process
writes them; if the file cannot be written, the timeline ends with a warning and the run goes on. A file that has grown
to `MOST_BYTES` becomes `timeline.older.jsonl`, in the place of an older one, so that a run of any length keeps between
one and two times this size, the newest lines.

All times are in seconds since 1970; missing numbers are `null`. The kinds of lines:

- `start`: a process starts to train `run`, a name that a resumed run keeps, at `version`, `resumed` or not, with
  `groups_per_batch`, `num_generations`, `max_staleness`, `schedule`, `engine_slots` (`null` where only the engine
  knows), `max_steps`, the `process` that trains (`trl_a3po.report.run_process`), the `accelerators` that the main
  process sees (0 if it trains on a CPU), all `settings`, the versions of `packages`, and the `rules` of the queue, the
  number of `devices` and the size of the `policy` (`trl_a3po.planning`);
- `group`: an attempt at a prompt ended (see `trl_a3po.rollout.outcomes.AttemptRecord`);
- `left_out`: a row of the data was left out; `row` is its place in the prompt stream, `dataset_row` its number in
  `train_dataset` (`null` in a stream), `reason` the kind of its fault and `text` what is wrong with it;
- `engine_start`, `publish`, `take`, `evaluation`, `step`: from `began` to `ended`, at `version` (for a step, the
  version that it produced). A take lasts as long as the trainer waits; the time of a step outside of the other lines
  is training. A take also says how many groups were in the engine (`sampling`), waited for their reward (`scoring`)
  or were `ready` when it began, and how many `capacity` admitted; and, as totals of the process when it ended, the
  seconds that `max_staleness` had `blocked` submission, the engine's `tokens` and `busy` seconds, and the `restarts`
  of its worker;
- `log`: `logged` holds every metric that was logged, under the names of the Trainer's `log_history`;
- `warning`: the `text` of a warning of this package;
- `checkpoint`: the checkpoint of `version` is being saved; `end`: training stopped, with the
  `error` that ended it (`null` where none did);
- `continued`: the first line of a file that continues another; it holds what the line `start` holds.
"""

import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from trl_a3po.report.lineage import Lineage
from trl_a3po.rollout.outcomes import AttemptRecord

logger = logging.getLogger(__name__)

NAME = "timeline.jsonl"
OLDER = "timeline.older.jsonl"
MOST_BYTES = 128 * 2**20
_MOST_OF_AN_ERROR = 2000  # characters
EPOCH = time.time() - time.monotonic()  # start of the monotonic clock, which is never set back
TIMES = ("submitted", "finished", "scoring", "scored", "ended")  # of an attempt, in the queue's clock


class Timeline:
    """Writes the lines of one `train()` call.

    Args:
        path: the file, whose folder is created.
        facts: values of the line `start`.
    """

    def __init__(self, path: Path, **facts: Any):
        self._path = path
        self._facts = facts
        self._lines: deque[str] = deque()  # any thread appends
        self._writable, self._file_opened = True, False
        self.write("start", **facts)

    @staticmethod
    def now() -> float:
        """Seconds since 1970."""
        return EPOCH + time.monotonic()

    def attempt(self, attempt: AttemptRecord) -> None:
        """Append a line for an attempt that ended. Any thread may call this; it does not touch the file."""
        facts = asdict(attempt)
        for name in TIMES:
            if facts[name] is not None:
                facts[name] += EPOCH
        self._append("group", facts)

    def write(self, kind: str, /, **facts: Any) -> None:
        """Append a line of this kind, with the time now."""
        self._append(kind, {"time": self.now(), **facts})

    def write_many_numbers(self, kind: str, facts: dict[str, Any]) -> None:
        """As `write`, in a tenth of the time, for facts that are all JSON and whose texts are valid Unicode."""
        self._lines.append(msgspec.json.encode({"kind": kind, "time": self.now(), **facts}).decode() + "\n")

    def log(self, logged: dict[str, Any]) -> None:
        """Append a line that holds what was logged."""
        self.write("log", logged=logged)

    @contextmanager
    def span(self, kind: str, /, **facts: Any) -> Iterator[None]:
        """Append a line that lasts as long as the context; no line if the context raises."""
        began = self.now()
        yield
        self.lasted(kind, began, **facts)

    def lasted(self, kind: str, began: float, /, **facts: Any) -> None:
        """Append a line that lasts from `began` until now."""
        self._append(kind, {"began": began, "ended": self.now(), **facts})

    def flush(self) -> None:
        """Write the new lines to the file. Main thread only."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if not lines or not self._writable:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._file_opened and self._path.stat().st_size >= MOST_BYTES:
                self._path.replace(self._path.with_name(OLDER))
                lines.insert(0, self._line("continued", {"time": self.now(), **self._facts}))
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines([*self._end_of_cut_line(), *lines])
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write the line `end`, with the error that is being handled, if any. Further calls do nothing."""
        if self._writable:
            error = sys.exc_info()[1]
            self.write("end", error=None if error is None else f"{type(error).__name__}: {error}"[:_MOST_OF_AN_ERROR])
            self.flush()
            self._writable = False

    def _give_up(self, error: Exception) -> None:
        self._writable = False
        logger.warning("The timeline %s cannot be written any more and ends here: %s", self._path, error)

    def _end_of_cut_line(self) -> list[str]:
        """A newline where the last line of an earlier process was cut by a kill."""
        if self._file_opened:
            return []
        self._file_opened = True
        content = self._path.read_bytes()[-1:]
        return ["\n"] if content not in (b"", b"\n") else []

    @staticmethod
    def _line(kind: str, facts: dict[str, Any]) -> str:
        return json.dumps(plain({"kind": kind, **facts}), default=str) + "\n"

    def _append(self, kind: str, facts: dict[str, Any]) -> None:
        try:
            self._lines.append(self._line(kind, facts))
        except (TypeError, ValueError) as error:
            self._give_up(error)


def end_if_left(folder: Path) -> None:
    """Append the end of a run that was killed behind its last optimizer step, once a process has found nothing left to
    train. Does nothing where there is no timeline, or where it has its end."""
    path = folder / NAME
    try:
        if path.is_file() and (lines := read_timeline(path)) and lines[-1]["kind"] != "end":
            end = Timeline._line("end", {"time": Timeline.now(), "error": None})
            with path.open("r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)  # what the kill has left of a line
                file.seek(0, os.SEEK_END)
                file.write(end.encode())
    except (OSError, ValueError) as error:
        logger.warning("The timeline %s cannot be given its end: %s", path, error)


def read_timeline(run: str | Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of a run, in the order they were written: `pandas.DataFrame(read_timeline(run, "group"))`.

    For a resumed run, this leaves out what the earlier process did after the checkpoint that the next one resumed
    from, so that every prompt of an epoch was trained once. For several runs in one folder, it returns the one that
    was started or resumed last. The lines of `timeline.older.jsonl`, if there are any, come first.

    Args:
        run: the run's `output_dir`, or its `timeline.jsonl`.
        kinds: the kinds of lines to return; all by default.

    Raises:
        FileNotFoundError: there is no timeline.
        ValueError: a line is not JSON, and it is not a last line of a process, which a kill may have cut.
    """
    path = Path(run)
    path = path / NAME if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{run} holds no {NAME}: give the output_dir of a run.")
    lineage = Lineage(path)
    for part in (path.with_name(OLDER), path):
        for line in whole_lines(part) if part.is_file() else ():
            lineage.add(line)
    return [line for line in lineage.lines if not kinds or line["kind"] in kinds]


def whole_lines(path: Path) -> list[str]:
    """The lines of a file, the last one also where no newline ends it."""
    text = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return text[:-1] if text[-1] == "" else text


def plain(value: Any) -> Any:
    """`value` as it is written: what is not a finite number is `None`."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
