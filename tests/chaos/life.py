"""One process of a chaotic run: it trains from the newest checkpoint on while faults fall, until one of them ends it
or the run is done."""

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tests.chaos.asked import Reward, misbehave_in_dataset
from tests.chaos.faults import FAULTS, REWARD_TIMEOUT
from tests.killed_run import Traced, note
from tests.tiny import VOCAB, tiny_prompts
from tests.workers.processes import children_that_run, until
from trl_a3po import A3POConfig
from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.choose_checkpoint import newest_valid
from trl_a3po.report.timeline import Timeline
from trl_a3po.session import termination
from trl_a3po.testing import StubEngine, scripted_completion
from trl_a3po.workers.running_clock import RunningClock

GENERATIONS, LENGTH, ROWS, SAVE_STEPS, BOUND = 2, 6, 24, 4, 4
GROUPS_PER_TAKE, STEPS_PER_TAKE = 2, 2


class Life(TrainerCallback):
    """What faults of this process need to know, and the callback that lets them fall.

    Args:
        folder: of the run.
        plan: `engine`, `scorer`, `urls`, `max_steps` and `faults`: a list of steps after the start,
            and names.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]):
        self.folder = folder
        self.plan = plan
        self.trainer: Traced | None = None
        self.clock_shift = self.suspended_seconds = 0.0
        self.around_save: Any = contextlib.nullcontext
        self.nan_loss = False
        self._begun: int | None = None
        self._due = list(plan["faults"])

    @property
    def engine_pid(self) -> int | None:
        engine = self.trainer._session.engine
        return engine.worker_pid if self.plan["engine"] == "worker" else None

    @property
    def server_pid(self) -> int:
        return int((self.folder / "server.pid").read_text())

    @property
    def reward_pids(self) -> list[int]:
        return reward_pids()

    def on_step_begin(self, args, state, control, **kwargs):
        if self._begun is None:
            self._begun = state.global_step
        while self._due and state.global_step >= self._begun + self._due[0][0]:
            _, name = self._due.pop(0)
            note(self.folder, fault=name, step=state.global_step, time=Timeline.now())
            FAULTS[name].apply(self)


class ChaoticTrainer(Traced):
    life: Life

    def _save_checkpoint(self, *args, **kwargs):
        with self.life.around_save():
            super()._save_checkpoint(*args, **kwargs)

    def _compute_loss(self, *args, **kwargs):
        loss = super()._compute_loss(*args, **kwargs)
        return loss * float("nan") if self.life.nan_loss else loss


def live(folder: Path, plan: dict[str, Any]) -> None:
    """Train until the end of the run, or until a fault ends it, and exit as a script does that catches nothing. Notes
    in `trace.jsonl` how it went."""
    begun = any(checkpoint.why_invalid(path) is None for path in checkpoint.checkpoints(folder))
    start = int(newest_valid(folder).name.split("-")[1]) if begun else 0
    note(folder, start=start, plan=plan, time=Timeline.now())
    before = _held()
    code = _trained(Life(folder, plan), begun)
    _check_left(folder, plan, before)
    sys.exit(code)


def _trained(life: Life, begun: bool) -> int:
    """The exit code."""
    with _clocks_of(life):
        try:
            life.trainer = _trainer(life)
            life.trainer.train(resume_from_checkpoint=begun)
            note(life.folder, end=life.trainer.state.global_step)
            return 0
        except BaseException as error:
            traceback.print_exc()
            cause = f" ({error.__cause__!r})" if error.__cause__ is not None else ""
            note(life.folder, error=f"{type(error).__name__}: {error}{cause}"[:2000])
            return error.code if isinstance(error, SystemExit) else 1
        finally:
            if life.trainer is not None:
                life.trainer.life = life.trainer = None


def _trainer(life: Life) -> ChaoticTrainer:
    plan, folder = life.plan, life.folder
    termination.DUPLICATE_SECONDS = 0.0
    engine: Any = {"worker": "transformers", "servers": "vllm"}.get(plan["engine"])
    args = A3POConfig(
        output_dir=str(folder),
        engine=engine or StubEngine(scripted_completion(VOCAB, LENGTH)),
        vllm_server_urls=plan["urls"] if engine == "vllm" else None,
        vllm_outage_timeout=30.0,
        engine_threads=1,
        engine_restarts=20,
        delivery_check_steps=50 if plan["engine"] == "worker" else 0,  # a stub's log-probs are no model's
        max_engine_gap=1e6,  # the groups of a checkpoint are those of another engine
        per_device_train_batch_size=GENERATIONS * GROUPS_PER_TAKE,
        num_generations=GENERATIONS,
        num_iterations=STEPS_PER_TAKE,
        max_completion_length=LENGTH,
        max_steps=plan["max_steps"],
        max_staleness=BOUND,
        reward_workers=int(plan["scorer"] == "process"),
        reward_timeout=REWARD_TIMEOUT,
        reward_on_timeout=plan["reward_on_timeout"],
        learning_rate=1e-4,
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        stall_timeout=60.0,
        use_cpu=True,
        report_to="none",
        logging_steps=10,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    dataset = tiny_prompts(ROWS)
    rows = dataset.with_transform(lambda batch: (misbehave_in_dataset(folder), batch)[1])
    trainer = ChaoticTrainer(str(folder / "model"), Reward(folder), args=args, train_dataset=rows, callbacks=[life])
    trainer.life = life
    return trainer


@contextlib.contextmanager
def _clocks_of(life: Life):
    """Inside, the clocks are those that faults have set."""
    wall, monotonic, defaults = time.time, time.monotonic, RunningClock.__init__.__defaults__
    time.time = lambda: wall() + life.clock_shift
    RunningClock.__init__.__defaults__ = (defaults[0], lambda: monotonic() + life.suspended_seconds)
    try:
        yield
    finally:
        time.time, RunningClock.__init__.__defaults__ = wall, defaults


def _held() -> tuple[set[str], set[str]]:
    """Names of the threads, and what the open files are."""
    return {thread.name for thread in threading.enumerate()}, _files()


def _files() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def _check_left(folder: Path, plan: dict[str, Any], before: tuple[set[str], set[str]]) -> None:
    """Notes the threads and files that are left of a run that has ended in order."""

    def left() -> list[str]:
        gc.collect()
        threads, files = (now - then for now, then in zip(_held(), before, strict=True))
        return sorted(name for name in threads | files if not name.startswith(("Thread-", "asyncio_")))

    if plan["faults"][-1][1] == "reward hangs in the thread":  # which nothing can end
        return
    with contextlib.suppress(AssertionError):
        until(lambda: not left(), timeout=10.0)
    note(folder, left=left())


def reward_pids() -> list[int]:
    """Ids of the reward workers of this process."""
    return list(children_that_run("trl_a3po.rewards.worker"))
