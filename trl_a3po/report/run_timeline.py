"""The timeline of a run: how it begins, and its optimizer steps."""

from collections.abc import Callable
from pathlib import Path

from transformers import TrainerCallback

from trl_a3po.config import A3POConfig
from trl_a3po.report.timeline import NAME, Timeline


def begin_timeline(args: A3POConfig, run: str | None, version: int, resumed: bool) -> Timeline:
    """The timeline of `run`, which begins, or goes on, at `version`."""
    return Timeline(
        Path(args.output_dir) / NAME,
        run=run,
        version=version,
        resumed=resumed,
        schedule=args.schedule,
        max_staleness=args.staleness_bound,
        groups_per_batch=args.groups_per_batch,
        num_generations=args.num_generations,
    )


class TimelineCallback(TrainerCallback):
    """Writes a line for each optimizer step, and then what else has happened until then.

    Args:
        timeline: the timeline of the run under way; `None` where there is none, as in all processes but the first.
    """

    def __init__(self, timeline: Callable[[], Timeline | None]):
        self._timeline = timeline
        self._began = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = Timeline.now()

    def on_step_end(self, args, state, control, **kwargs):
        timeline = self._timeline()
        if timeline is not None:
            timeline.lasted("step", self._began, version=state.global_step)
            timeline.flush()
