"""A long run of a tiny model: what a process gains over time in memory, open files, threads and processes.

    python recipes/benchmarks/soak.py --minutes 30 --output runs/soak

The run samples on the engine's worker, scores in a reward worker, publishes at each step, saves checkpoints and writes
its timeline as any run does; only the model is small, so that steps take milliseconds and thousands of them fit. Every
`--every` seconds a line is added to `samples.jsonl`. Started again with the same `--output`, the run goes on from its
newest checkpoint until `--minutes` have been measured in all. At the end, `soak.json` holds for each curve its level
after the warm-up and how much it grows in an hour, and `soak.png` the curves.
"""

import argparse
import json
import os
import threading
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from transformers import TrainerCallback

from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.checkpoints import checkpoint
from trl_a3po.cli.smoke import save_smoke_model, smoke_reward, smoke_rows
from trl_a3po.report.chart_style import BLUE, GREY, RULE

WARM_UP = 0.2  # share of the samples that are left out of a trend: allocators, caches and imports fill up
CURVES = {  # of a sample: title
    "trainer_mib": "trainer: memory (MiB)",
    "engine_mib": "engine: memory (MiB)",
    "rewards_mib": "reward worker: memory (MiB)",
    "files": "trainer: open files",
    "threads": "trainer: threads",
    "processes": "processes",
    "segments": "/dev/shm: segments, of the machine",
    "outstanding": "queue: prompts outstanding",
    "steps_per_second": "optimizer steps per second",
    "output_mib": "output_dir (MiB)",
}


class Sampler(TrainerCallback):
    """Measures the processes of a run, and ends it when `minutes` have been measured.

    Args:
        path: of the samples, which are appended.
        every: seconds between two samples.
        minutes: of all samples of the file.
    """

    def __init__(self, path: Path, every: float, minutes: float):
        self._path, self._every, self._minutes = path, every, minutes
        self.trainer: A3POTrainer | None = None
        self._last = (time.monotonic(), None)
        self._due = time.monotonic() + every

    def on_step_end(self, args, state, control, **kwargs):
        if time.monotonic() < self._due:
            return
        self._due += self._every
        (before, steps), now = self._last, time.monotonic()
        self._last = now, state.global_step
        speed = None if steps is None else (state.global_step - steps) / (now - before)
        sample = {"minute": self._next_minute(), "step": state.global_step, "steps_per_second": speed}
        with self._path.open("a") as file:
            file.write(json.dumps(sample | measured(self.trainer)) + "\n")
        control.should_training_stop = sample["minute"] >= self._minutes

    def _next_minute(self) -> float:
        """Minutes that the run has been measured for, without those between two processes."""
        samples = read_samples(self._path)
        return (samples[-1]["minute"] if samples else 0.0) + self._every / 60


def measured(trainer: A3POTrainer) -> dict[str, float]:
    children = descendants(os.getpid())
    engine = trainer._session.engine.worker_pid
    rewards = [pid for pid in children if b"trl_a3po.rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    status = trainer._session.queue.status()
    return {
        "trainer_mib": resident(os.getpid()),
        "engine_mib": resident(engine),
        "rewards_mib": sum(map(resident, rewards)),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "processes": len(children) + 1,
        "segments": len(os.listdir("/dev/shm")),
        "outstanding": status.outstanding,
        "output_mib": sum(f.stat().st_size for f in Path(trainer.args.output_dir).rglob("*") if f.is_file()) / 2**20,
    }


def resident(pid: int) -> float:
    """Resident memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]


def read_samples(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trends(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """For each curve, after the warm-up: its median, its least and most, and the slope of a line through it."""
    kept = samples[int(WARM_UP * len(samples)) :]
    found = {}
    for name in CURVES:
        points = [(s["minute"] / 60, s[name]) for s in kept if s[name] is not None]
        hours, values = np.array(points).T
        slope = float(np.polyfit(hours, values, 1)[0]) if len(points) > 2 else 0.0
        found[name] = {
            "median": float(np.median(values)),
            "least": float(values.min()),
            "most": float(values.max()),
            "per_hour": slope,
        }
    return found


def draw(samples: list[dict[str, float]], path: Path) -> None:
    figure, panels = plt.subplots(2, 5, figsize=(16, 5), layout="constrained")
    for axes, (name, title) in zip(panels.flat, CURVES.items(), strict=True):
        points = [(s["minute"], s[name]) for s in samples if s[name] is not None]
        axes.plot(*zip(*points, strict=True), color=BLUE, linewidth=1)
        axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
        axes.set_ylim(0, 1.15 * max(max(value for _, value in points), 1))
        axes.tick_params(labelsize=8, colors=GREY)
        axes.grid(color=RULE, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[1]:
        axes.set_xlabel("minutes", fontsize=8, color=GREY)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=5, help="seconds between two samples")
    parser.add_argument("--output", default="runs/soak", help="folder of the run, the samples and the plot")
    arguments = parser.parse_args()
    output = Path(arguments.output).resolve()
    if not (output / "model").is_dir():
        save_smoke_model(output / "model")
    args = A3POConfig(
        output_dir=str(output / "run"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=10_000_000,
        max_staleness=2,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        engine_threads=1,
        reward_workers=1,
        save_steps=500,
        save_total_limit=2,
        logging_steps=10,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    sampler = Sampler(output / "samples.jsonl", arguments.every, arguments.minutes)
    trainer = A3POTrainer(
        str(output / "model"), smoke_reward, args=args, train_dataset=smoke_rows(), callbacks=[sampler]
    )
    sampler.trainer = trainer
    begun = any(checkpoint.why_invalid(folder) is None for folder in checkpoint.checkpoints(output / "run"))
    trainer.train(resume_from_checkpoint=begun)
    samples = read_samples(output / "samples.jsonl")
    found = trends(samples) | {"steps": samples[-1]["step"], "minutes": samples[-1]["minute"]}
    (output / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(samples, output / "soak.png")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
