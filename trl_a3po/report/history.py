"""What a run logged, read from its folder.

Guarantees: the newest state of the run is read, also of one that was stopped; nothing is read that is not a log.
"""

import json
from pathlib import Path
from typing import Any

NAMES = ("trainer_state.json", "log_history.json")


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """The `log_history` of a run: one dictionary per logging step, as `pandas.DataFrame` takes it.

    Args:
        run: the run's `output_dir`, one of its checkpoints, or a `trainer_state.json`. Of a folder without a state of
            its own, the newest checkpoint's is read.

    Raises:
        FileNotFoundError: there is no state.
        ValueError: the file is not a Trainer's state or log.
    """
    path = _state_file(Path(run))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): name a run's folder or its trainer_state.json.") from error
    history = content.get("log_history") if isinstance(content, dict) else content
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise ValueError(f"{path} holds no log_history: name a run's folder or its trainer_state.json.")
    return history


def _state_file(run: Path) -> Path:
    if run.is_file():
        return run
    checkpoints = sorted(run.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]), reverse=True)
    for folder in (run, *checkpoints):
        for name in NAMES:
            if (folder / name).is_file():
                return folder / name
    raise FileNotFoundError(
        f"{run} holds no trainer_state.json, nor does a checkpoint in it: name the output_dir of a run that has saved "
        "a checkpoint or ended."
    )
