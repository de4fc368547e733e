"""How close the planner's forecasts are to measured runs.

    python recipes/benchmarks/forecasts.py                      # all runs, four minutes on two cores
    python recipes/benchmarks/forecasts.py slow_engine ragged   # some of them
    python recipes/benchmarks/forecasts.py --engine transformers

Every run is a real one: the trainer, the queue and the rewards are those of any run, and the times are read from its
timeline. The policy is tiny, and artificial delays make the runs reproducible: the engine decodes in steps of a given
time, with as many slots as it is given, and training takes a given time for each token. With `--engine transformers`,
nothing is delayed but the rewards.

The rates are measured once, in the runs `calibration` and `small_batches`, whose schedule is "sync" and whose
micro-batches differ. The other runs have other settings, and are forecast from those rates and from these settings, as
`trl-a3po plan --run calibration --run small_batches` does. `error` is that of the forecast, `from one` its error from
`calibration` alone, and `own` that from the rates of the run itself, which leaves only the rules of the queue.
"""

import argparse
import json
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.cli.smoke import save_smoke_model, smoke_rows
from trl_a3po.planning.finished_run import FinishedRun, finished_run, rates_of
from trl_a3po.planning.forecast import Forecast, forecast
from trl_a3po.planning.workload import Fixed
from trl_a3po.protocol.engine import EngineEvent, GroupFinished, GroupRequest
from trl_a3po.protocol.records import Rollout
from trl_a3po.report.timeline import read_timeline
from trl_a3po.testing import StubEngine

sys.path.append(str(Path(__file__).parents[1]))
from limits import MADE, delayed_reward

GENERATIONS, LONGEST, VOCABULARY, STEPS = 4, 48, 33, 14
DECODE_STEP, DECODE_SEQUENCE = 0.006, 0.0004  # seconds of a decode step, and what each sequence adds to it
TRAINING_TOKEN = 0.0012  # seconds


@dataclass(frozen=True)
class Measured:
    """
    Args:
        settings: of the `A3POConfig`, beside those of the calibration.
        slots: of the engine.
        mean: length of completions before they are cut at `LONGEST`.
        reward: seconds of a group.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    slots: int = 32
    mean: float = 20.0
    reward: float = 0.002


SMALL = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
RATES = ("calibration", "small_batches")
RUNS = {
    "calibration": Measured({"schedule": "sync"}),
    "small_batches": Measured({"schedule": "sync", **SMALL}),
    "balanced": Measured(),
    "slow_engine": Measured(slots=6),
    "slow_training": Measured({"num_iterations": 2}),
    "slow_reward": Measured(reward=0.12),
    "small_staleness": Measured({"max_staleness": 1}, slots=12),
    "ragged": Measured({"max_staleness": 1, "max_completion_length": 240}, mean=60.0),
    "periodic": Measured({"schedule": "periodic", **SMALL}),
    "fixed_lag": Measured({"schedule": "fixed_lag", "max_staleness": 1}),
}  # fmt: skip


class PacedEngine(StubEngine):
    """An engine with slots that decodes in real time: each step lasts as long as `DECODE_STEP` and `DECODE_SEQUENCE`
    say, and every sequence that has a slot gets a token, stamped with the version published last."""

    def __init__(self, slots: int, mean: float, longest: int):
        self.mean, self.longest = mean, longest
        super().__init__(self.completion)
        self.slots = slots
        self.begun: list[tuple[Any, ...]] = []  # request, tokens, log-probs, versions so far
        self.waiting: deque[tuple[GroupRequest, list[int], list[float]]] = deque()
        self.ended: dict[int, list[Rollout]] = {}
        self.next_step: float | None = None

    def completion(self, prompt_ids: Sequence[int], rollout: int) -> list[int]:
        noise = random.Random(f"{list(prompt_ids)} {rollout} {len(self.requests)}")
        length = min(self.longest, 1 + int(noise.expovariate(1 / self.mean)))
        return [noise.randrange(3, VOCABULARY) for _ in range(length)]

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        sequences = [(request, rollout) for request in requests for rollout in range(request.num_rollouts)]
        tokens = [self.completion(request.prompt_ids, rollout) for request, rollout in sequences]
        logps = self.logps([request.prompt_ids for request, _ in sequences], tokens)
        with self._lock:
            self.requests.extend(requests)
            self.ended |= {request.request_id: [] for request in requests}
            self.waiting.extend(zip((request for request, _ in sequences), tokens, logps, strict=True))

    @torch.no_grad()
    def logps(self, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of all completions in one forward pass, which takes next to no time."""
        whole = [[*prompt, *completion] for prompt, completion in zip(prompts, tokens, strict=True)]
        longest = max(map(len, whole))
        replica, _ = self._started()
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in whole])
        logps = replica(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return [row[len(p) - 1 :][: len(t)].tolist() for row, p, t in zip(logps, prompts, tokens, strict=True)]

    def wait(self, timeout: float) -> list[EngineEvent]:
        until = time.monotonic() + timeout
        while True:
            with self._lock:
                self.begun += [(*self.waiting.popleft(), []) for _ in range(self.room())]
            if not self.begun:
                self.next_step = None
                time.sleep(min(timeout, 0.001))
                return []
            step = DECODE_STEP + DECODE_SEQUENCE * len(self.begun)
            self.next_step = (time.monotonic() if self.next_step is None else self.next_step) + step
            time.sleep(max(0.0, self.next_step - time.monotonic()))
            if (events := self.decode()) or time.monotonic() >= until:
                return events

    def room(self) -> int:
        return min(len(self.waiting), self.slots - len(self.begun))

    def decode(self) -> list[EngineEvent]:
        with self._lock:
            events: list[EngineEvent] = []
            for sequence in list(self.begun):
                request, tokens, logps, versions = sequence
                versions.append(self.version)
                if len(versions) < len(tokens):
                    continue
                self.begun.remove(sequence)
                ended = self.ended[request.request_id]
                ended.append(Rollout(tokens, logps, versions, "length"))
                if len(ended) == request.num_rollouts:
                    events.append(GroupFinished(request.request_id, self.ended.pop(request.request_id)))
            return events


class PacedTraining(TrainerCallback):
    """Has every training forward and its backward pass last at least `TRAINING_TOKEN` for each completion token."""

    def __init__(self, trainer: A3POTrainer):
        compute = trainer.compute_loss

        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            began, tokens = time.monotonic(), int(inputs["completion_mask"].sum())
            loss = compute(model, inputs, *args, **kwargs)
            time.sleep(max(0.0, began + TRAINING_TOKEN * tokens - time.monotonic()))
            return loss

        trainer.compute_loss = compute_loss


def make_run(run: Measured, folder: Path, engine: str) -> None:
    """Train, and leave the timeline in `folder`."""
    settings = {
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "num_generations": GENERATIONS,
        "max_completion_length": LONGEST,
        "max_staleness": 4,
        **run.settings,
    }
    paced = engine == "paced"
    chosen = PacedEngine(run.slots, run.mean, settings["max_completion_length"]) if paced else engine
    args = A3POConfig(
        output_dir=str(folder),
        engine=chosen,
        engine_slots=run.slots,
        max_steps=STEPS * settings.get("num_iterations", 1),
        learning_rate=1e-7,
        **MADE,
        **settings,
    )
    with TemporaryDirectory() as model:
        save_smoke_model(Path(model))
        trainer = A3POTrainer(model, delayed_reward(run.reward), args, train_dataset=smoke_rows(256))
        if paced:
            PacedTraining(trainer)
        trainer.train()


def forecast_of(run: Measured, own: FinishedRun, rates: Sequence[FinishedRun]) -> Forecast:
    """The forecast of a run from the rates of others, and from its own settings."""
    work = replace(rates[0].work, reward_seconds=Fixed(run.reward))
    work = work if run.mean == Measured.mean else replace(work, lengths=own.work.lengths)
    return forecast(work, rates_of(rates), replace(own.split, slots=run.slots), own.rules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--engine", choices=("paced", "transformers"), default="paced")
    parser.add_argument("--folder", type=Path, help="keep the runs here, and read those that are here already")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("run", "measured", "forecast", "error", "from one", "own", "waiting", "forecast", "bound", "limit")
    numbers = {}
    with TemporaryDirectory() as folder:
        folder = parsed.folder or Path(folder)
        finished = {}
        for name in dict.fromkeys([*RATES, *(parsed.runs or RUNS)]):
            if not (folder / name / "timeline.jsonl").is_file():
                make_run(RUNS[name], folder / name, parsed.engine)
            finished[name] = finished_run(read_timeline(folder / name))
        rates = [finished[name] for name in RATES]
        print(rates_of(rates))
        for name, own in finished.items():
            made = forecast_of(RUNS[name], own, rates)
            others = forecast_of(RUNS[name], own, rates[:1]), forecast(own.work, own.rates, own.split, own.rules)
            errors = [each.step_seconds / own.step_seconds - 1 for each in (made, *others)]
            numbers[name] = {"measured": own.step_seconds, "forecast": made.step_seconds}
            numbers[name] |= dict(zip(("error", "from one", "own"), errors, strict=True))
            limit = made.verdict.limit if made.verdict else ""
            table.add_row(name, f"{own.step_seconds:.3f} s", f"{made.step_seconds:.3f} s",
                          *(f"{error:+.1%}" for error in errors), f"{own.waiting:.0%}", f"{made.waiting:.0%}",
                          f"{made.bound:.3f} s", limit)  # fmt: skip
    Console().print(table)
    if parsed.json:
        parsed.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
