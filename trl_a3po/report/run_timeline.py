"""The timeline of a run: its first line, and a line for each optimizer step."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_a3po import __version__
from trl_a3po.config import A3POConfig
from trl_a3po.report.environment import package_versions
from trl_a3po.report.recorded_settings import recorded_settings
from trl_a3po.report.timeline import NAME, Timeline


def begin_timeline(args: A3POConfig, run: str | None, version: int, resumed: bool) -> Timeline:
    """The timeline of `run`, which starts, or is resumed, at `version`."""
    return Timeline(
        Path(args.output_dir or ".") / NAME,
        run=run,
        version=version,
        resumed=resumed,
        schedule=args.schedule,
        max_staleness=args.staleness_bound,
        groups_per_batch=args.groups_per_batch,
        num_generations=args.num_generations,
        settings=recorded_settings(args),
        packages={"trl-a3po": __version__, "Python": platform.python_version(), **package_versions()},
    )


class TimelineCallback(TrainerCallback):
    """Appends a line for each optimizer step, then writes all new lines to the file.

    Args:
        timeline: returns the timeline of the run; `None` in all processes but the main one.
    """

    def __init__(self, timeline: Callable[[], Timeline | None]):
        self._timeline = timeline
        self._began = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began = Timeline.now()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        timeline = self._timeline()
        if timeline is not None:
            timeline.lasted("step", self._began, version=state.global_step)
            timeline.flush()
