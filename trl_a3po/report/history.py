"""What a run logged, read from its folder, as lists of dictionaries that `pandas.DataFrame` takes.

Guarantees: the newest record of the run is read, also of one that was stopped or killed; nothing is read that is not a
log.
"""

import json
import re
from pathlib import Path
from typing import Any

from trl_a3po.report.timeline import NAME as TIMELINE
from trl_a3po.report.timeline import read_timeline

NAMES = ("trainer_state.json", "log_history.json")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
OF_STALENESS = re.compile(r"a3po/d(\d+)/(.+)")


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """The `log_history` of a run: one dictionary per logging step, as `pandas.DataFrame` takes it.

    Args:
        run: the run's `output_dir`, one of its checkpoints, a `trainer_state.json` or a `timeline.jsonl`. Of a folder,
            whichever of the two was written last is read; of one without either, its newest checkpoint's.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: the file is not a Trainer's state or log.
    """
    path = _log_file(Path(run))
    if path.suffix == ".jsonl":
        return [_logged(line) for line in read_timeline(path, "log")]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): name a run's folder or its trainer_state.json.") from error
    history = content.get("log_history") if isinstance(content, dict) else content
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise ValueError(f"{path} holds no log_history: name a run's folder or its trainer_state.json.")
    return history


def by_staleness(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of each staleness as rows: `step`, `staleness`, and every `a3po/d<staleness>/<name>` as `<name>`.

    For a curve of each staleness: `pandas.DataFrame(by_staleness(history)).pivot(index="step", columns="staleness")`.
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for entry in history:
        for key, value in entry.items():
            if found := OF_STALENESS.fullmatch(key):
                step, staleness = entry["step"], int(found[1])
                row = rows.setdefault((step, staleness), {"step": step, "staleness": staleness})
                row[found[2]] = value
    return [rows[key] for key in sorted(rows)]


def _logged(line: dict[str, Any]) -> dict[str, Any]:
    if "logged" in line:
        return line["logged"]
    return {name: value for name, value in line.items() if name not in ("kind", "time")}  # as once written


def _log_file(run: Path) -> Path:
    if run.is_file():
        return run
    steps = {path: CHECKPOINT.fullmatch(path.name) for path in run.glob("checkpoint-*")}
    checkpoints = sorted((path for path in steps if steps[path]), key=lambda path: int(steps[path][1]), reverse=True)
    for folder in (run, *checkpoints):
        files = [folder / name for name in (*NAMES, TIMELINE) if (folder / name).is_file()]
        if files:
            return max(files, key=lambda file: file.stat().st_mtime)
    raise FileNotFoundError(
        f"{run} holds no trainer_state.json and no {TIMELINE}, nor does a checkpoint in it: name the output_dir of a "
        "run."
    )
