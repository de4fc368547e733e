"""Runs a script under both names, and says in which respects the runs differ."""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tests.runs import COMPLETE
from tests.scripts import arms
from trl_a3po.testing import StubEngine

SHAPES = Path(__file__).parent / "shapes"
IMPORT = "from trl import GRPOConfig, GRPOTrainer\n"
OF_THE_RUN = {"timeline.jsonl", "rollouts.jsonl"}  # beside TRL's files; and, in a checkpoint, those named a3po_…
TIMES = ("runtime", "per_second", "step_time", "my/seconds", "total_flos")
ARMS = {
    "GRPOTrainer": ("GRPOConfig", "GRPOTrainer"),
    "A3POTrainer at staleness 0": ("FreshConfig", "A3POTrainer"),
    "A3POTrainer": ("StaleConfig", "A3POTrainer"),
}


class Recorder(TrainerCallback):
    """Keeps which events happened, in order, and every log."""

    runs: list["Recorder"] = []  # noqa: RUF012  # of the script that is running

    def __init__(self):
        self.events: list[str] = []
        self.logs: list[dict[str, Any]] = []
        Recorder.runs.append(self)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.events.append("on_log")
        self.logs.append(dict(logs))


def _noted(event: str):
    return lambda self, *args, **kwargs: self.events.append(event)


for _event in ("train_begin", "train_end", "epoch_begin", "epoch_end", "step_begin", "step_end", "substep_end",
               "pre_optimizer_step", "optimizer_step", "evaluate", "predict", "save", "prediction_step"):  # fmt: skip
    setattr(Recorder, f"on_{_event}", _noted(f"on_{_event}"))


@dataclass
class Ran:
    """What a script did."""

    steps: int
    parameters: dict[str, torch.Tensor]
    events: list[list[str]]
    logs: list[list[dict[str, Any]]]
    trained_on: Counter[tuple[int, ...]]
    files: set[str] = field(default_factory=set)


def run(name: str, arm: str, model: str, folder: Path, monkeypatch) -> Ran:
    """Run the script of this name with the names of this arm."""
    config, trainer_class = ARMS[arm]
    source = (SHAPES / f"{name}.py").read_text(encoding="utf-8")
    assert source.count(IMPORT) == 1, f"{name} imports both names in one line"
    ours = f"from tests.scripts.arms import {config} as GRPOConfig, {trainer_class} as GRPOTrainer\n"
    monkeypatch.setattr("transformers.trainer.DEFAULT_CALLBACKS", [*_default_callbacks(), Recorder])
    monkeypatch.setattr("trl_a3po.session.session.build_engine", lambda *args: StubEngine(COMPLETE))
    getattr(arms, trainer_class).trained_on, Recorder.runs = [], []
    names: dict[str, Any] = {"__name__": f"script_{name}"}
    torch.manual_seed(3)
    exec(compile(source.replace(IMPORT, ours), str(SHAPES / f"{name}.py"), "exec"), names)
    trainer = names["main"](model, str(folder))
    return Ran(
        trainer.state.global_step,
        {name: value.detach().clone() for name, value in trainer.model.named_parameters()},
        [recorder.events for recorder in Recorder.runs],
        [recorder.logs for recorder in Recorder.runs],
        Counter(getattr(arms, trainer_class).trained_on),
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()},
    )


def differences(mine: Ran, theirs: Ran) -> list[str]:
    """In which respects `mine`, of `A3POTrainer` at staleness 0, differs from `theirs`."""
    checks = {
        "steps": mine.steps == theirs.steps,
        "prompts": mine.trained_on == theirs.trained_on,
        "parameters": mine.parameters.keys() == theirs.parameters.keys() and all(map(_close, *_paired(mine, theirs))),
        "order of callbacks": mine.events == theirs.events,
        "names in the log": [[_names(entry) for entry in logs] for logs in mine.logs]
        == [[_names(entry) for entry in logs] for logs in theirs.logs],
        "files": {file for file in mine.files if not _is_of_the_run(file)} == theirs.files,
    }
    return [what for what, same in checks.items() if not same] + _other_numbers(mine.logs, theirs.logs)


def _default_callbacks() -> list[type]:
    from transformers.trainer import DefaultFlowCallback

    return [DefaultFlowCallback]


def _paired(mine: Ran, theirs: Ran):
    names = sorted(mine.parameters.keys() & theirs.parameters.keys())
    return [mine.parameters[name] for name in names], [theirs.parameters[name] for name in names]


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=2e-6)


def _names(entry: dict[str, Any]) -> list[str]:
    return sorted(name for name in entry if not name.removeprefix("eval_").startswith("a3po/"))


def _other_numbers(mine: list, theirs: list) -> list[str]:
    """The metrics that differ, up to the first slash of their names."""
    ours, expected = ([entry for logs in runs for entry in logs] for runs in (mine, theirs))
    names = {name for one, other in zip(ours, expected, strict=False) for name in other if not _same(one, other, name)}
    return sorted({f"`{name.split('/')[0]}` in the log" for name in names})


def _same(ours: dict[str, Any], expected: dict[str, Any], name: str) -> bool:
    if any(word in name for word in TIMES):
        return True
    one, other = (math.nan if entry.get(name) is None else entry[name] for entry in (ours, expected))
    return math.isclose(one, other, rel_tol=1e-2, abs_tol=1e-4) or (math.isnan(one) and math.isnan(other))


def _is_of_the_run(file: str) -> bool:
    return Path(file).name in OF_THE_RUN or Path(file).name.startswith("a3po_")
