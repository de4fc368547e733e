"""A run in two processes that fails on purpose, or goes on after such a failure.

`torchrun … -m tests.distributed.failing FOLDER MODE FAULT`, with `nothing` for a fault: then it resumes.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from accelerate.utils import gather_object
from transformers import TrainerCallback

from tests.distributed.runs import build, leave, use_deepspeed
from tests.runs import LENGTH
from tests.tiny import VOCAB
from tests.workers.processes import until
from trl_a3po.errors import CheckpointError, EngineError
from trl_a3po.testing import StubEngine, scripted_completion

STEPS, FAILS_AT = 5, 3


class Fails(TrainerCallback):
    """Fails in process 1, in the middle of training."""

    def __init__(self, fault: str):
        self.fault = fault

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step != FAILS_AT or args.process_index != 1:
            return
        if self.fault == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.fault == "terminate the launcher":
            os.kill(os.getppid(), signal.SIGTERM)
            until(termination_is_asked_for)
        if self.fault == "raise":
            raise ZeroDivisionError("a callback of process 1")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "nan":
            next(model.parameters()).ds_tensor[-1] = float("nan")  # in the part of process 1, which no other one has


def termination_is_asked_for() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_DFL


class DiesInPublish(StubEngine):
    """Dies when it has taken the first of the weights of a version."""

    def publish(self, update):
        if update.version == FAILS_AT:
            for name, _ in update.tensors.items():
                raise EngineError(f"The engine died while it took {name}.")
        super().publish(update)


def gathers(completions, **kwargs):
    with contextlib.suppress(BaseException):
        gather_object([0.0])
    return [0.0] * len(completions)


def main() -> None:
    folder, mode, fault = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if mode.startswith("zero"):
        use_deepspeed(folder, int(mode[-1]))
    complete = scripted_completion(VOCAB, LENGTH)
    settings = {"output_dir": str(folder / "run"), "save_strategy": "steps", "save_steps": 1, "max_steps": STEPS}
    if fault.startswith("terminate"):
        settings["save_steps"] = STEPS + 1  # only because of the signal
    if fault == "publish":
        settings["engine"] = DiesInPublish(complete)
    if fault == "starve":
        settings |= {"stall_timeout": 3.0, "reward_timeout": 3.0}
    trainer = build(folder, mode, 2, **settings)
    if fault == "gather":
        trainer.reward_funcs[0] = gathers
    if fault == "starve":
        scores = trainer.reward_funcs[0]
        trainer.reward_funcs[0] = lambda *a, **k: (
            time.sleep(3600) if trainer.state.global_step >= FAILS_AT - 1 else scores(*a, **k)
        )
        trainer.reward_funcs[0].__name__ = "reward"
    trainer.add_callback(Fails(fault))
    try:
        trainer.train(resume_from_checkpoint=True if fault == "nothing" else None)
    except CheckpointError as error:
        (folder / f"refused-{trainer.args.process_index}").write_text(str(error))
        raise
    outcomes = {"step": trainer.state.global_step, "published": trainer.args.engine.published}
    if trainer.is_world_process_zero():
        (folder / "resumed.json").write_text(json.dumps(outcomes))
    leave()


if __name__ == "__main__":
    main()
