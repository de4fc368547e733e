# /// script
# dependencies = ["trl-a3po"]
# ///
"""Seven short runs, each limited by something else, made with artificial delays on a tiny random model.

    python recipes/limits.py outputs/limits                   # all, in half a minute on two cores
    python recipes/limits.py outputs/limits slow_reward balanced

Each run is a folder with a timeline, to look at with `trl-a3po watch`, `doctor` and `plot`, and to find out from these
what limits the run. `LIMITS` below has the answers.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import TrainerCallback

from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.cli.smoke import save_smoke_model, smoke_reward, smoke_rows
from trl_a3po.protocol.engine import EngineEvent, GroupRequest
from trl_a3po.testing import StubEngine, scripted_completion

GENERATIONS, LENGTH, VOCABULARY = 2, 8, 33
STRAGGLES = 5  # the place of one group in so many that is a straggler
MADE = {
    "delivery_check_steps": 0,
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Settings of every run that is made for its timeline alone."""


@dataclass(frozen=True)
class Limited:
    """Delays and settings of a run; all times in seconds.

    Args:
        training: of an optimizer step.
        sampling: of a group. The engine samples a group at a time, or all at once if it `samples_all`.
        reward: of a group.
        straggler: of sampling every `STRAGGLES`-th group.
        settings: of the `A3POConfig`.
    """

    training: float = 0.04
    sampling: float = 0.005
    reward: float = 0.0
    straggler: float | None = None
    samples_all: bool = False
    groups_per_batch: int = 2
    settings: tuple[tuple[str, Any], ...] = ()


RUNS = {
    "slow_reward": Limited(reward=0.12),
    "slow_engine": Limited(sampling=0.12),
    "slow_training": Limited(training=0.3),
    "straggler": Limited(straggler=0.6, samples_all=True, groups_per_batch=4, settings=(("max_staleness", 1),)),
    "tiny_queue": Limited(sampling=0.4, samples_all=True, groups_per_batch=1,
                          settings=(("max_staleness", 1), ("engine_slots", 32))),
    "balanced": Limited(training=0.3, sampling=0.14),
    "held_back": Limited(training=0.15, sampling=0.1, settings=(("max_staleness", 0),)),
}  # fmt: skip
LIMITS = {
    "slow_reward": "rewards",
    "slow_engine": "generation",
    "slow_training": "training",
    "straggler": "straggler",
    "tiny_queue": "tiny queue",
    "balanced": "balanced",
    "held_back": "max_staleness",
}
"""What limits each run, as `trl_a3po.report.verdict` names it."""


class DelayedEngine(StubEngine):
    """The stub engine, whose groups are finished only after a while."""

    def __init__(self, run: Limited):
        super().__init__(scripted_completion(VOCABULARY, LENGTH))
        self.run = run
        self.free_at = 0.0  # when a group can be begun
        self.due: dict[int, float] = {}

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            slow = self.run.straggler is not None and request.noise_key % STRAGGLES == STRAGGLES - 1
            begins = time.monotonic() if self.run.samples_all else max(time.monotonic(), self.free_at)
            self.free_at = begins + (self.run.straggler if slow else self.run.sampling)
            self.due[request.request_id] = self.free_at
        super().submit(requests)

    def wait(self, timeout: float) -> list[EngineEvent]:
        time.sleep(min(timeout, 0.002))
        now = time.monotonic()
        with self._lock:
            events = [event for event in self._events if self.due[event.request_id] <= now]
            self._events = [event for event in self._events if event not in events]
        return events


class DelayedTraining(TrainerCallback):
    """Has every optimizer step last `seconds` from its first forward pass."""

    def __init__(self, model: torch.nn.Module, seconds: float):
        self.seconds = seconds
        self.began: float | None = None
        model.register_forward_pre_hook(self.forward_begins)

    def forward_begins(self, model: torch.nn.Module, inputs: Any) -> None:
        self.began = self.began or time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(max(0.0, (self.began or 0.0) + self.seconds - time.monotonic()))
        self.began = None


def delayed_reward(seconds: float) -> Callable[..., list[float]]:
    def reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        time.sleep(seconds)
        return smoke_reward(completion_ids)

    return reward


def make_run(name: str, folder: Path, steps: int = 16) -> None:
    """Train the run called `name`, and leave its timeline in `folder`."""
    run = RUNS[name]
    args = A3POConfig(
        output_dir=str(folder),
        engine=DelayedEngine(run),
        max_steps=steps,
        per_device_train_batch_size=run.groups_per_batch * GENERATIONS,
        gradient_accumulation_steps=1,
        num_generations=GENERATIONS,
        max_completion_length=LENGTH,
        **{**MADE, "max_staleness": 2, **dict(run.settings)},
    )
    with TemporaryDirectory() as model:
        save_smoke_model(Path(model))
        trainer = A3POTrainer(model, delayed_reward(run.reward), args, train_dataset=smoke_rows(128))
    trainer.add_callback(DelayedTraining(trainer.accelerator.unwrap_model(trainer.model), run.training))
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where each run gets a folder of its own")
    parser.add_argument("runs", nargs="*", default=[], choices=[*RUNS, []], metavar="RUN", help=", ".join(RUNS))
    parsed = parser.parse_args()
    for name in parsed.runs or RUNS:
        make_run(name, parsed.folder / name)
        print(f"{parsed.folder / name} is made", flush=True)
