"""What a run logged, read from its folder as a list of dictionaries, which `pandas.DataFrame` accepts.

Guarantees: the newest log of the run is read, also for a run that was stopped or killed, with every metric that was
logged; a file that is not a log raises an error.
"""

import json
import re
from pathlib import Path
from typing import Any

from trl_a3po.report.at_a_glance import at_a_glance
from trl_a3po.report.timeline import NAME as TIMELINE
from trl_a3po.report.timeline import plain, read_timeline

NAMES = ("trainer_state.json", "log_history.json")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
OF_STALENESS = re.compile(r"a3po/d(\d+)/(.+)")


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """What a run logged: one dictionary per logging step, which `pandas.DataFrame` accepts.

    Args:
        run: the run's `output_dir`, one of its checkpoints, a `trainer_state.json` or a `timeline.jsonl`. In a folder,
            the file that was written last is read; in a folder without either, that of its newest checkpoint. The
            metrics that a `trainer_state.json` leaves out are taken from the `timeline.jsonl` of the run.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: the file is not a Trainer's state or log.
    """
    path = _log_file(Path(run))
    if path.suffix == ".jsonl":
        return [_logged(line) for line in read_timeline(path, "log")]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): give a run's folder or its trainer_state.json.") from error
    history = content.get("log_history") if isinstance(content, dict) else content
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise ValueError(f"{path} holds no log_history: give a run's folder or its trainer_state.json.")
    timelines = [folder / TIMELINE for folder in (path.parent, path.parent.parent) if (folder / TIMELINE).is_file()]
    return _with_all_metrics(history, read_history(timelines[0])) if timelines else history


def by_staleness(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of each staleness as rows: `step`, `staleness`, and every `a3po/d<staleness>/<name>` as `<name>`.

    To draw a curve for each staleness: `pandas.DataFrame(by_staleness(history)).pivot(index="step",
    columns="staleness")`.
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for entry in history:
        for key, value in entry.items():
            if found := OF_STALENESS.fullmatch(key):
                step, staleness = entry["step"], int(found[1])
                row = rows.setdefault((step, staleness), {"step": step, "staleness": staleness})
                row[found[2]] = value
    return [rows[key] for key in sorted(rows)]


def _with_all_metrics(history: list[dict[str, Any]], logged: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`history`, with the entry of `logged` in the place of each entry that is a part of it."""

    def shown(entry: dict[str, Any]) -> str:
        return json.dumps(at_a_glance(plain(entry)), sort_keys=True)

    complete = {shown(entry): entry for entry in logged}
    return [complete.get(shown(entry), entry) for entry in history]


def _logged(line: dict[str, Any]) -> dict[str, Any]:
    # Earlier versions wrote what was logged into the line itself.
    logged: dict[str, Any] = line.get("logged", line)
    return {name: value for name, value in logged.items() if logged is not line or name not in ("kind", "time")}


def _log_file(run: Path) -> Path:
    if run.is_file():
        return run
    matches = ((path, CHECKPOINT.fullmatch(path.name)) for path in run.glob("checkpoint-*"))
    steps = {path: int(match[1]) for path, match in matches if match is not None}
    checkpoints = sorted(steps, key=steps.__getitem__, reverse=True)
    for folder in (run, *checkpoints):
        files = [folder / name for name in (*NAMES, TIMELINE) if (folder / name).is_file()]
        if files:
            return max(files, key=lambda file: file.stat().st_mtime)
    raise FileNotFoundError(
        f"{run} holds no trainer_state.json and no {TIMELINE}, nor does a checkpoint in it: give the output_dir of a "
        "run."
    )
