"""A run in simulated time: the queue of a real run, with engines, rewards and a trainer that only take time.

Guarantees: what is submitted, scored and taken when is decided by `rollout.queue_core.QueueCore`, as in a real run;
the lines that a simulation returns are those of a timeline, so whatever reads a timeline reads a simulation. The same
arguments give the same run.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trl_a3po.planning.rates import Rates
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulated_engine import SimulatedEngine
from trl_a3po.planning.workload import Workload
from trl_a3po.protocol.engine import GroupFinished
from trl_a3po.protocol.records import Rollout, Score
from trl_a3po.rollout.outcomes import AttemptRecord
from trl_a3po.rollout.prompt_stream import PromptStream, TokenizedPrompt
from trl_a3po.rollout.queue_core import QueueCore
from trl_a3po.rollout.take_clock import TakeClock
from trl_a3po.rollout.take_plan import TakePlan

SCORE = Score(rewards=[[0.0]])
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Split:
    """How the devices of a run are shared out.

    Args:
        trainers: processes that train.
        engines: engines, each with a replica of the policy.
        slots: completions that each engine decodes at a time.
    """

    trainers: int = 1
    engines: int = 1
    slots: int = 64

    def __post_init__(self) -> None:
        for name in ("trainers", "engines", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but a run needs at least 1.")


@dataclass
class Simulated:
    """What was simulated after the warm-up.

    Args:
        lines: of the whole simulation, as `read_timeline` returns them.
        steps: optimizer steps.
        seconds: their duration.
        takes: how many takes.
        tokens: completion tokens trained.
        training, waiting, publishing: seconds of the trainer.
        engine_idle: seconds in which an engine had nothing to do, mean of the engines.
        slot_seconds: slots in use times seconds, sum of the engines.
        scoring: seconds of all reward workers together.
        staleness: tokens by staleness.
        ready: groups that were ready after each take.
        outstanding: groups that were outstanding after each take.
    """

    lines: list[Line] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    takes: int = 0
    tokens: float = 0.0
    training: float = 0.0
    waiting: float = 0.0
    publishing: float = 0.0
    engine_idle: float = 0.0
    slot_seconds: float = 0.0
    scoring: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    ready: list[int] = field(default_factory=list)
    outstanding: list[int] = field(default_factory=list)


def simulate(
    work: Workload, rates: Rates, split: Split, rules: Rules, *, takes: int, warm_up: int | None = None, seed: int = 0
) -> Simulated:
    """Simulate at least `takes` takes of a run that goes on behind them, after a warm-up. What is measured begins and
    ends with a generation batch and an optimizer step.

    Args:
        warm_up: takes of the warm-up; by default as many as the queue needs to fill, twice.
    """
    ahead = rules.takes_in_bound
    warm_up = 2 * (ahead + rules.takes_per_generation) if warm_up is None else warm_up
    end = warm_up + takes + 2 * rules.takes_in_cycle + ahead + 2
    return _Run(work, rates, split, rules, warm_up, takes, end, seed).run()


class _Run:
    """One simulation. Times are in seconds from its beginning."""

    def __init__(
        self, work: Workload, rates: Rates, split: Split, rules: Rules, warm_up: int, takes: int, end: int, seed: int
    ):
        self.work, self.rates, self.split, self.rules = work, rates, split, rules
        self.warm_up, self.takes = warm_up, takes
        self.generator = np.random.default_rng(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        clock = TakeClock(
            rules.micro_steps_per_take,
            rules.micro_steps_per_step,
            micro_steps_per_epoch=None,
            first_version=0,
            last_version=-(-end * rules.micro_steps_per_take // rules.micro_steps_per_step),
        )
        self.core = QueueCore(
            prompts=PromptStream(({} for _ in itertools.count()), lambda row: TokenizedPrompt([0])),
            plan=TakePlan(
                rules.groups_per_take, rules.max_staleness, clock.version_of_take, clock.total_takes, rules.lag
            ),
            num_rollouts=1,
            max_attempts=1,
            max_in_flight=rules.max_in_flight,
            max_rejected_in_a_row=1,
            replaces_groups=False,
            attempt_ended=self._attempt_ended,
            clock=lambda: self.now,
            running=lambda: self.now,
        )
        self.engines = [SimulatedEngine(rates.engine, split.slots) for _ in range(split.engines)]
        self.changes = [0] * split.engines  # an event of an engine is void once something else has changed it
        self.loads = [(0, number) for number in range(split.engines)]  # groups, engine: a heap
        self.load_of = [0] * split.engines
        self.prompts: dict[int, int] = {}  # of the requests in the engines
        self.lengths: dict[int, list[float]] = {}  # of the completions of each prompt
        self.tokens: dict[int, dict[int, float]] = {}  # by version, of each prompt whose group has been sampled
        self.idle_workers = rules.reward_workers
        self.ready = self.to_score = self.version = 0
        self.step_began = 0.0
        self.deadline: int | None = None
        self.trainer = self._train()
        self.trainer_waits = self.is_over = False
        self.measured = Simulated(lines=[self._start()])
        self.is_measured = warm_up == 0

    def run(self) -> Simulated:
        self.core.published(0)
        self._resume()
        while not self.is_over:
            self.now, _, action = heapq.heappop(self.events)
            action()
        return self.measured

    # --- the trainer --------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Run the trainer up to its next wait, which is for some seconds or for groups (`None`)."""
        seconds = next(self.trainer)
        self.trainer_waits = seconds is None
        if seconds is not None:
            self._after(seconds, self._resume)

    def _train(self) -> Generator[float | None, None, None]:
        rules, published, seconds = self.rules, 0, 0.0
        for micro_step in itertools.count():
            take, used = divmod(micro_step, rules.micro_steps_per_take)
            if used == 0:
                due = self.version - published >= rules.weight_sync_steps
                if due and take % rules.takes_per_generation == 0:
                    yield from self._publish(self.version)
                    published = self.version
                seconds = yield from self._take(self.version)
            ends = (micro_step + 1) % rules.micro_steps_per_step == 0
            training = seconds + self.rates.optimizer_step_seconds * ends
            self._spend("training", training)
            yield training
            if ends:
                self._end_step()
                self._end_cycle(micro_step + 1)
            if self.is_over:
                yield None

    def _end_step(self) -> None:
        self.version += 1
        self._line("step", self.step_began, version=self.version)
        if self.is_measured:
            self.measured.steps += 1
            self.measured.seconds += self.now - self.step_began
        self.step_began = self.now

    def _end_cycle(self, micro_steps: int) -> None:
        """Begin to measure, or end the simulation, if a generation batch ends with this optimizer step."""
        takes, rest = divmod(micro_steps, self.rules.micro_steps_per_take)
        if rest or takes % self.rules.takes_in_cycle:
            return
        if not self.is_measured and takes >= self.warm_up:
            self._measure()
        elif self.measured.takes >= self.takes:
            self._end()

    def _publish(self, version: int) -> Generator[float | None, None, None]:
        began = self.now
        while self.core.plan.lag is not None:  # as `GenerationQueue.publish`
            self._submit()
            if self.core.settled:
                break
            yield None
        self._spend("waiting", self.now - began)
        self._spend("publishing", self.rates.publish_seconds)
        yield self.rates.publish_seconds
        for engine in self.engines:
            engine.publish(self.now, version)
        self.core.published(version)
        self._submit()
        self._line("publish", began, version=version)

    def _take(self, version: int) -> Generator[float | None, None, float]:
        """Wait for the groups of a take. Returns the seconds of training of each micro-step that uses them."""
        began = self.now
        self._submit()
        while self.ready < self.rules.groups_per_take or (groups := self.core.try_take(version)) is None:
            self._note_deadline()
            yield None
        self.deadline = None
        self.ready -= self.rules.groups_per_take
        self._line("take", began, version=version)
        tokens: Counter[int] = Counter()
        for group in groups:
            tokens.update(self.tokens.pop(group.prompt.index))
        total = sum(tokens.values())
        if self.is_measured:
            measured = self.measured
            measured.takes += 1
            measured.waiting += self.now - began
            measured.tokens += total
            for sampled, count in tokens.items():
                measured.staleness[version - sampled] += count
            measured.ready.append(self.ready)
            measured.outstanding.append(len(self.core.order))
        self._submit()
        rate = self.rates.training_tokens_per_second * self.split.trainers
        seconds = total * self.rules.num_iterations / rate / self.rules.micro_steps_per_take
        return seconds + self.rates.micro_step_seconds

    def _note_deadline(self) -> None:
        """Note the prompt that the take may not overtake. Until it or an earlier one is ready, the take goes on
        waiting: other groups come behind it."""
        if self.ready >= self.rules.groups_per_take:
            position = self.core.choice().deadline
            assert position is not None, "a take that has its groups waits only for a deadline"
            self.deadline = self.core.order[position].prompt.index

    def _spend(self, what: str, seconds: float) -> None:
        if self.is_measured:
            setattr(self.measured, what, getattr(self.measured, what) + seconds)

    def _measure(self) -> None:
        self.is_measured = True
        for engine in self.engines:
            engine.settle(self.now)
            engine.idle_seconds = engine.slot_seconds = 0.0

    def _end(self) -> None:
        self.is_over = True
        self.core.close()
        for engine in self.engines:
            engine.settle(self.now)
        self.measured.engine_idle = sum(engine.idle_seconds for engine in self.engines) / len(self.engines)
        self.measured.slot_seconds = sum(engine.slot_seconds for engine in self.engines)

    # --- engines and rewards ------------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Submit what admission allows, each group to the engine with the least to do, as `SeveralEngines` does."""
        self.core.prompts.fill(self.core.prompts_wanted)
        touched = set()
        for request in self.core.submissions():
            number = self._least_loaded()
            self._load(number, 1)
            lengths = self.work.lengths.draw(self.generator, self.rules.num_generations).tolist()
            self.prompts[request.request_id], self.lengths[request.noise_key] = request.noise_key, lengths
            self.engines[number].submit(self.now, request.request_id, lengths)
            touched.add(number)
        for number in touched:
            self._expect(number)

    def _least_loaded(self) -> int:
        while self.loads[0][0] != self.load_of[self.loads[0][1]]:
            heapq.heappop(self.loads)
        return self.loads[0][1]

    def _load(self, number: int, groups: int) -> None:
        self.load_of[number] += groups
        heapq.heappush(self.loads, (self.load_of[number], number))

    def _expect(self, number: int) -> None:
        """Schedule the next end of a sequence in an engine, in place of the one scheduled before."""
        self.changes[number] += 1
        if (at := self.engines[number].next_end()) < float("inf"):
            self._at(at, partial(self._sampled, number, self.changes[number]))

    def _sampled(self, number: int, change: int) -> None:
        if change != self.changes[number]:
            return
        ended = self.engines[number].ended(self.now)
        for request_id, tokens in ended:
            versions = sorted(tokens)
            rollout = Rollout([0] * len(versions), [0.0] * len(versions), versions)
            self.tokens[self.prompts.pop(request_id)] = tokens
            self.core.engine_event(GroupFinished(request_id, [rollout]))
            self.to_score += 1
            self._load(number, -1)
        if ended and self.rules.max_in_flight is not None:
            self._submit()
        self._expect(number)
        if ended:
            self._score()
        if ended and self.trainer_waits and self.core.plan.lag is not None:
            self._resume()

    def _score(self) -> None:
        while self.idle_workers and self.to_score and (due := self.core.next_to_score()) is not None:
            self.idle_workers -= 1
            self.to_score -= 1
            seconds = float(self.work.reward_seconds.draw(self.generator, 1)[0])
            if self.is_measured:
                self.measured.scoring += seconds
            self._after(seconds, partial(self._scored, due[0], due[1].prompt.index))

    def _scored(self, request_id: int, prompt: int) -> None:
        self.core.record_score(request_id, SCORE)
        self.ready += 1
        self.idle_workers += 1
        self._score()
        if self.trainer_waits and (self.deadline is None or prompt <= self.deadline):
            self._resume()

    # --- time and lines -----------------------------------------------------------------------------------------

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), action))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(self.now + seconds, action)

    def _line(self, kind: str, began: float, **facts: Any) -> None:
        self.measured.lines.append({"kind": kind, "began": began, "ended": self.now, **facts})

    def _attempt_ended(self, attempt: AttemptRecord) -> None:
        lengths = self.lengths.pop(attempt.prompt)
        self.measured.lines.append({"kind": "group", **asdict(attempt), "lengths": lengths, "tokens": sum(lengths)})

    def _start(self) -> Line:
        rules, split = self.rules, self.split
        return {
            "kind": "start",
            "time": 0.0,
            "run": None,
            "version": 0,
            "resumed": False,
            "schedule": rules.schedule,
            "max_staleness": rules.max_staleness,
            "groups_per_batch": rules.groups_per_take * rules.takes_per_generation,
            "num_generations": rules.num_generations,
            "engine_slots": split.slots * split.engines,
            "settings": {"engine": rules.engine, "reward_workers": rules.reward_workers},
            "rules": asdict(rules),
            "devices": asdict(split),
        }
