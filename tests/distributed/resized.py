"""One stretch of a run, in as many processes as are launched: `torchrun … -m tests.distributed.resized FOLDER MODE RUN
[CHECKPOINT]` trains to step 4 and saves the model in `FOLDER/RUN/model`, from the checkpoint if one is named."""

import os
import sys
from pathlib import Path

from tests.distributed.runs import build, leave, use


def main() -> None:
    folder, mode, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    checkpoint = str(folder / sys.argv[4]) if len(sys.argv) > 4 else None
    use(folder, mode)
    trainer = build(
        folder,
        mode,
        int(os.environ["WORLD_SIZE"]),
        output_dir=str(folder / name),
        save_strategy="steps",
        save_steps=1,
        max_steps=4,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(folder / name / "model"))
    leave()


if __name__ == "__main__":
    main()
