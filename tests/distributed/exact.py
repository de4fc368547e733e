"""In float64: `schedule="sync"` in one process or, with random orders of arrival, `schedule="periodic"` in several.
`torchrun … -m tests.distributed.exact FOLDER` saves what each of `RUNS` trained, and when, in `FOLDER/<run>.pt`."""

import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState

from tests.distributed.runs import leave
from tests.periodic import ShufflingEngine, float64_throughout, prompts_of_one_length, trained
from tests.runs import COMPLETE
from trl_a3po.testing import StubEngine

RUNS = {
    "full": {},  # dapo: scaled once the period's tokens are known
    "kl": {"beta": 0.1, "loss_type": "dr_grpo"},
    "lora-kl": {"lora": True, "beta": 0.1},
}
SEEDS = (1, 2)


def run(folder: Path, name: str, schedule: str, processes: int, seed: int | None) -> None:
    trainer, gradients = trained(
        str(folder / "model"),
        folder / "runs",
        schedule,
        processes=processes,
        engine=StubEngine(COMPLETE) if seed is None else ShufflingEngine(seed),
        train_dataset=prompts_of_one_length(),
        ddp_backend="gloo",
        **RUNS[name],
    )
    if trainer.is_world_process_zero():
        kept = {
            "gradients": gradients,
            "weights": {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad},
            "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
            "taken": trainer.taken,
        }
        torch.save(kept, folder / f"{name}-{schedule}-{seed}.pt")
    AcceleratorState._reset_state()
    GradientState._reset_state()


def main() -> None:
    folder, processes = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    float64_throughout()
    for name in RUNS:
        if processes == 1:
            run(folder, name, "sync", 1, None)
        else:
            for seed in SEEDS:
                run(folder, name, "periodic", processes, seed)
    leave()


if __name__ == "__main__":
    main()
