"""A run of two processes that is resumed in the middle of a generation batch, beside the one that was not stopped:
`torchrun … -m tests.distributed.resumed FOLDER MODE [lora]` saves both in `FOLDER/whole` and `FOLDER/resumed`."""

import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from tests.distributed.runs import build, leave, use


def main() -> None:
    folder, mode, lora = Path(sys.argv[1]), sys.argv[2], "lora" in sys.argv[3:]
    use(folder, mode)
    settings = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,  # two optimizer steps a batch
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 4,
        "optim": "adamw_torch",  # which has a state to resume
        "learning_rate": 0.01,
    }
    trainer = build(folder, mode, 2, lora=lora, **settings)
    trainer.train()
    trainer.save_model(str(folder / "whole"))
    AcceleratorState._reset_state()
    GradientState._reset_state()
    trainer = build(folder, mode, 2, lora=lora, **settings)
    trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-1"))
    trainer.save_model(str(folder / "resumed"))
    leave()


if __name__ == "__main__":
    main()
