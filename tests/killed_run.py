"""A small run that writes down what it takes, to be killed and started again:
`python -m tests.killed_run FOLDER STEPS`.

Each start appends to `FOLDER/trace.jsonl`: the step it goes on from, then each take: the version it happened at, its
prompts, and the oldest and newest version of their tokens.
"""

import json
import random
import sys
import time
from pathlib import Path

from tests.runs import taken_groups
from tests.tiny import VOCAB, save_tiny_model, tiny_prompts
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.choose_checkpoint import newest_valid
from trl_a3po.testing import StubEngine, scripted_completion

GENERATIONS, LENGTH, ROWS, BOUND = 2, 4, 12, 4


class SlowEngine(StubEngine):
    """Each group takes its own time, so that some are in flight whenever the run is killed."""

    def __init__(self, complete):
        super().__init__(complete)
        self.due = []

    def wait(self, timeout):
        self.due += [(time.monotonic() + random.random() * 0.2, event) for event in super().wait(timeout)]
        now = time.monotonic()
        ready, self.due = [e for t, e in self.due if t <= now], [(t, e) for t, e in self.due if t > now]
        return ready


class Traced(A3POTrainer):
    def _take(self):
        rows = super()._take()
        stamps = [v for group in taken_groups(self) for rollout in group.rollouts for v in rollout.versions]
        note(
            self.args.output_dir,
            take=self.state.global_step,
            prompts=[group.prompt.index for group in taken_groups(self)],
            rows=[group.prompt.example["target"] for group in taken_groups(self)],
            oldest=min(stamps),
            newest=max(stamps),
        )
        return rows


def note(folder, **values):
    with open(Path(folder) / "trace.jsonl", "a") as file:
        file.write(json.dumps(values) + "\n")


def reward(completion_ids, **kwargs):
    time.sleep(random.random() * 0.03)
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def main(folder: str, steps: int) -> None:
    if not Path(folder, "model", "tokenizer.json").is_file():
        save_tiny_model(Path(folder, "model"))
    args = A3POConfig(
        output_dir=folder,
        engine=SlowEngine(scripted_completion(VOCAB, LENGTH)),
        per_device_train_batch_size=4,
        num_generations=GENERATIONS,
        num_iterations=2,
        gradient_accumulation_steps=2,
        max_completion_length=LENGTH,
        max_steps=steps,
        max_staleness=BOUND,
        learning_rate=3e-3,
        save_steps=1,
        save_total_limit=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = Traced(str(Path(folder, "model")), reward, args=args, train_dataset=tiny_prompts(ROWS))
    begun = any(checkpoint.why_invalid(path) is None for path in checkpoint.checkpoints(Path(folder)))
    start = newest_valid(Path(folder)).name.split("-")[1] if begun else 0
    note(folder, start=int(start))
    trainer.train(resume_from_checkpoint=begun)
    note(folder, end=trainer.state.global_step)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
