"""One run of the study, `train(run, settings)`, which leaves a file of JSON lines.

Guarantees: the file's first line says which run it is, each optimizer step appends a line at once, and the last line
has `"done": true`; so a run that is cut leaves its steps, and a run is finished if and only if its file says so.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from learning.tasks import TASKS, prompt_of, rows, scores
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from trl_a3po import A3POConfig, A3POTrainer

METHODS: dict[str, dict[str, Any]] = {
    "behavior": {"proximal_method": "behavior"},
    "recompute": {"proximal_method": "recompute"},
    "reuse": {"proximal_method": "reuse"},
    "loglinear": {"proximal_method": "loglinear"},
    "loglinear, no cap": {"proximal_method": "loglinear", "behavior_weight_mode": "none"},
    "asympo": {"objective": "asympo"},
    "spo": {"objective": "spo"},
    "icepop": {"objective": "masked_is", "proximal_method": "reuse"},
    "plain": {"objective": "spo", "spo_negative_scale": 1.0},
}
"""Name -> the settings of `A3POConfig`. "behavior" is GRPO with its ratio to the policy that sampled; "plain" is the
policy gradient without any correction."""
GRPO_TRAINER, ASYNC = "GRPOTrainer", "async"
PROMPTS, GENERATIONS = 16, 8
KEPT = {
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "groups_all_equal",
    "completions/mean_length": "tokens",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "kl": "kl",
    "clip_ratio/low_mean": "clip_low",  # of GRPOTrainer; A3POTrainer's own come later and replace it
    "clip_ratio/high_mean": "clip_high",
    "a3po/clip/low": "clip_low",
    "a3po/clip/high": "clip_high",
    "a3po/w/min": "w_min",
    "a3po/w/max": "w_max",
    "a3po/w/capped": "w_capped",
    "a3po/r/min": "r_min",
    "a3po/r/max": "r_max",
    "a3po/rho/min": "rho_min",
    "a3po/rho/max": "rho_max",
    "a3po/ess": "ess",
    "a3po/staleness/mean": "staleness",
    "a3po/staleness/max": "staleness_max",
    "a3po/engine_gap/mean": "engine_gap",
    "a3po/time/wait": "wait",
    "step_time": "step_time",
}
"""Metric -> its name in the file."""


@dataclass(frozen=True)
class Run:
    """A run. `cap` None is the method's own, and infinite means none; `alone`: it has its GPU to itself, so that its
    seconds can be compared."""

    task: str
    method: str
    staleness: int
    seed: int
    learning_rate: float
    cap: float | None = None
    alone: bool = False

    @property
    def name(self) -> str:
        method = self.method.replace(", ", "_").replace(" ", "_")
        cap = "" if self.cap is None else f"-cap{self.cap:g}"
        return f"{self.task}-{method}-d{self.staleness}-s{self.seed}-lr{self.learning_rate:g}{cap}"


@dataclass(frozen=True)
class Settings:
    """What all runs share."""

    model: str
    steps: int
    prompts: int
    generations: int
    output: str


class StepLog(TrainerCallback):
    """Appends the metrics of each step to the file, and says its reward. Seconds count from the beginning of the first
    step."""

    def __init__(self, file: TextIO, name: str):
        self.file, self.name, self.began = file, name, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" not in logs:
            return
        seconds = round(time.perf_counter() - self.began, 3)
        write_line(self.file, {"step": state.global_step, "seconds": seconds, **kept(logs)})
        step = f"step {state.global_step} of {state.max_steps}"
        say(f"{self.name}: {step}, {seconds:.0f} s, reward {logs['reward']:.2f}")


def kept(logs: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step that are kept, under their names in the file."""
    return {short: round(logs[name], 6) for name, short in KEPT.items() if name in logs}


def write_line(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def say(line: str) -> None:
    """Print `line` on a CPU. On GPUs many runs train at the same time, and how many are finished is printed."""
    if not torch.accelerator.is_available():
        print(line, flush=True)


def train(run: Run, settings: Settings) -> None:
    """Train `run`, and write its file into the folder `runs` of the output."""
    folder = Path(settings.output) / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with (folder / f"{run.name}.jsonl").open("w") as file:
        write_line(file, {"run": asdict(run), "steps": settings.steps})
        say(f"{run.name}: loads the model, and answers the held-out questions")
        trainer, tokenizer = build(run, settings)
        before = held_out_reward(trainer.model, tokenizer, run.task)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(StepLog(file, run.name))
        trainer.train()
        after = held_out_reward(trainer.model, tokenizer, run.task)
        seconds = round(time.perf_counter() - began, 1)
        say(f"{run.name}: finished in {seconds:.0f} s; held-out reward {before:.2f}, after training {after:.2f}")
        write_line(file, {"done": True, "held_out_before": before, "held_out": after, "total_seconds": seconds})


def build(run: Run, settings: Settings) -> tuple[GRPOTrainer, Any]:
    """The trainer of a run, and its tokenizer."""
    set_seed(run.seed)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    data = [
        {"prompt": prompt_of(run.task, tokenizer, row["question"]), "answer": row["answer"]}
        for row in rows(run.task, "train")
    ]

    def reward(completions, answer, **kwargs):
        return scores(run.task, completions, answer)

    kind = GRPOTrainer if run.method == GRPO_TRAINER else A3POTrainer
    trainer = kind(
        model, reward, args=config(run, settings), train_dataset=Dataset.from_list(data), processing_class=tokenizer
    )
    return trainer, tokenizer


def config(run: Run, settings: Settings) -> GRPOConfig:
    """The same batch, optimizer and loss normalisation for every method. In float32, so that the engine's log-probs
    are the trainer's and staleness is all that the ratios show."""
    shared = {
        "output_dir": str(Path(settings.output) / "trainers" / run.name),
        "per_device_train_batch_size": settings.prompts * settings.generations,
        "num_generations": settings.generations,
        "max_completion_length": TASKS[run.task].tokens,
        "max_steps": settings.steps,
        "learning_rate": run.learning_rate,
        "lr_scheduler_type": "constant",
        "loss_type": "grpo",
        "scale_rewards": "none",
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": run.seed,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if run.method == GRPO_TRAINER:
        return GRPOConfig(**shared)
    method = METHODS["loglinear" if run.method == ASYNC else run.method]
    return A3POConfig(
        **shared,
        **method,
        **capped(run.cap),
        schedule="async" if run.method == ASYNC else "fixed_lag",
        max_staleness=run.staleness,
        engine_slots=settings.prompts * settings.generations,
        engine_threads=1,
        delivery_check_steps=0,
        kept_rollouts=0,
        log_all_metrics=True,
    )


def capped(cap: float | None) -> dict[str, Any]:
    if cap is None:
        return {}
    return {"behavior_weight_mode": "none"} if math.isinf(cap) else {"behavior_weight_cap": cap}


@torch.no_grad()
def held_out_reward(model: torch.nn.Module, tokenizer: Any, task: str) -> float:
    """The mean reward of greedy completions of the held-out prompts."""
    held_out = rows(task, "held_out")
    prompts = [prompt_of(task, tokenizer, row["question"]) for row in held_out]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    was_training = model.training
    model.eval()
    output = model.generate(**inputs, max_new_tokens=TASKS[task].tokens, do_sample=False)
    model.train(was_training)
    said = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    found = scores(task, said, [row["answer"] for row in held_out])
    return round(sum(found) / len(found), 4)
