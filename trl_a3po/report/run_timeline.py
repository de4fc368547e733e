"""The timeline of a run: its first line, a line for each optimizer step, and what the line of a take says of queue and
engine."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_a3po import __version__
from trl_a3po.config import A3POConfig
from trl_a3po.protocol.engine import EngineStats
from trl_a3po.report.environment import package_versions
from trl_a3po.report.recorded_settings import recorded_settings
from trl_a3po.report.run_process import this_process
from trl_a3po.report.timeline import NAME, Timeline
from trl_a3po.rollout.wait_reasons import QueueStatus


def begin_timeline(
    args: A3POConfig,
    run: str | None,
    version: int,
    resumed: bool,
    *,
    slots: int | None,
    max_steps: int,
    rules: dict[str, Any],
    devices: dict[str, int],
    policy: dict[str, Any],
) -> Timeline:
    """The timeline of `run`, which starts, or is resumed, at `version`, and ends after `max_steps`.

    Args:
        slots: completions that the engine decodes at a time, `None` where only the engine knows.
        rules, devices, policy: of the run, as `trl_a3po.planning` reads them.
    """
    return Timeline(
        Path(args.output_dir or ".") / NAME,
        run=run,
        version=version,
        resumed=resumed,
        schedule=args.schedule,
        max_staleness=args.staleness_bound,
        groups_per_batch=args.groups_per_batch,
        num_generations=args.num_generations,
        engine_slots=slots,
        max_steps=max_steps,
        process=this_process(),
        accelerators=0 if args.device.type == "cpu" else torch.accelerator.device_count(),
        settings=recorded_settings(args),
        packages={"trl-a3po": __version__, "Python": platform.python_version(), **package_versions()},
        rules=rules,
        devices=devices,
        policy=policy,
    )


def facts_of_take(found: QueueStatus, left: QueueStatus, engine: EngineStats) -> dict[str, Any]:
    """What the line of a take says beside its times.

    Args:
        found: the queue when the take began.
        left: the queue when the take ended.
        engine: the engine's counters then.
    """
    return {
        "sampling": found.in_engine,
        "scoring": found.waiting_for_reward,
        "ready": found.ready,
        "capacity": found.capacity,
        "blocked": left.staleness_blocked_seconds,
        "tokens": engine.tokens,
        "busy": engine.busy_seconds,
        "restarts": engine.restarts,
    }


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
