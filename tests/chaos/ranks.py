"""One of two processes of a run, started without a launcher, which goes on from the newest checkpoint:
`python -m tests.chaos.ranks FOLDER STEPS` with torchrun's variables set.

Each appends to `FOLDER/trace.jsonl` the step it goes on from, and each step that it begins with its reward workers. At
the end the model is in `FOLDER/final`. With `fixed_lag`, what is trained does not depend on timing.
"""

import sys
from pathlib import Path

from transformers import TrainerCallback

from tests.chaos.life import reward_pids
from tests.distributed.runs import build, leave
from tests.killed_run import note
from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.choose_checkpoint import newest_valid

PROCESSES, ROWS, ACCUMULATION, GENERATIONS, STEPS_PER_TAKE = 2, 2, 2, 4, 2
GROUPS_PER_STEP = PROCESSES * ROWS * ACCUMULATION // GENERATIONS


class Notes(TrainerCallback):
    def __init__(self, folder: Path):
        self.folder = folder

    def on_step_begin(self, args, state, control, **kwargs):
        note(self.folder, rank=args.process_index, begins=state.global_step, workers=reward_pids())


def main(folder: Path, steps: int) -> None:
    run = folder / "run"
    trainer = build(
        folder,
        "ddp",
        PROCESSES,
        output_dir=str(run),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUMULATION,
        steps_per_generation=ACCUMULATION * STEPS_PER_TAKE,
        num_generations=GENERATIONS,
        max_steps=steps,
        reward_workers=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
    )
    trainer.add_callback(Notes(folder))
    begun = any(checkpoint.why_invalid(path) is None for path in checkpoint.checkpoints(run))
    start = int(newest_valid(run).name.split("-")[1]) if begun else 0
    note(folder, rank=trainer.args.process_index, start=start)
    trainer.train(resume_from_checkpoint=begun)
    trainer.save_model(str(folder / "final"))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
