"""The forecast of a run: time of a step, what is idle, staleness, and what limits it.

Guarantees: pure; a forecast is never faster than `bound`, what training alone, generation alone or the rewards alone
take at their best.
"""

import math
from dataclasses import dataclass

from trl_a3po.planning.rates import Rates
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulation import Simulated, Split, simulate
from trl_a3po.planning.workload import Workload
from trl_a3po.report.verdict import Verdict, verdict_of

SEQUENCES, LEAST_TAKES, MOST_TAKES = 20_000, 12, 200


@dataclass(frozen=True)
class Forecast:
    """
    Args:
        split: what it is a forecast of.
        step_seconds: of an optimizer step.
        bound: the least seconds that a step can take: the longest of training with its publishes, generation, and
            rewards.
        tokens_per_second: completion tokens trained per second.
        waiting, publishing: shares of the trainer's time.
        engine_idle: share of the time in which an engine has nothing to do, mean of the engines.
        slots_used: share of the engines' slots in use.
        rewards_idle: share of the time in which a reward worker has nothing to do.
        staleness: share of the tokens by staleness, in optimizer steps.
        ready, outstanding: groups ready, and groups submitted and not taken, after a take; means.
        verdict: what limits the run, `None` if nothing can be said.
    """

    split: Split
    step_seconds: float
    bound: float
    tokens_per_second: float
    waiting: float
    publishing: float
    engine_idle: float
    slots_used: float
    rewards_idle: float
    staleness: dict[int, float]
    ready: float
    outstanding: float
    verdict: Verdict | None

    @property
    def mean_staleness(self) -> float:
        return sum(staleness * share for staleness, share in self.staleness.items())


def forecast(work: Workload, rates: Rates, split: Split, rules: Rules, seed: int = 0) -> Forecast:
    """Simulate the run for long enough that its means settle."""
    takes = min(MOST_TAKES, max(LEAST_TAKES, SEQUENCES // rules.completions_per_take))
    simulated = simulate(work, rates, split, rules, takes=takes, seed=seed)
    return _forecast(simulated, bound_seconds(work, rates, split, rules), split, rules)


def bound_seconds(work: Workload, rates: Rates, split: Split, rules: Rules) -> float:
    """The least seconds of an optimizer step, whatever is done at the same time.

    Training and publishing take turns on the trainer's devices. Generation is bounded by the tokens of a step at the
    highest speed of engines that decode as much as their slots and `max_staleness` allow, and the rewards by their
    workers.
    """
    groups = rules.groups_per_take / rules.steps_per_take
    tokens = groups * rules.num_generations * work.lengths.mean
    training = tokens * rules.num_iterations / (rates.training_tokens_per_second * split.trainers)
    generation_steps = rules.takes_per_generation * rules.steps_per_take
    between = math.ceil(rules.weight_sync_steps / generation_steps) * generation_steps
    training += rates.micro_step_seconds * rules.micro_steps_per_step + rates.optimizer_step_seconds
    training += rates.publish_seconds / between
    decoded = min(split.slots, rules.takes_in_bound * rules.completions_per_take / split.engines)
    generation = tokens / (rates.engine.fastest(decoded) * split.engines)
    return max(training, generation, groups * work.reward_seconds.mean / rules.reward_workers)


def _forecast(simulated: Simulated, bound: float, split: Split, rules: Rules) -> Forecast:
    seconds, tokens = simulated.seconds, sum(simulated.staleness.values())
    return Forecast(
        split=split,
        step_seconds=seconds / simulated.steps,
        bound=bound,
        tokens_per_second=simulated.tokens / seconds,
        waiting=simulated.waiting / seconds,
        publishing=simulated.publishing / seconds,
        engine_idle=simulated.engine_idle / seconds,
        slots_used=simulated.slot_seconds / seconds / (split.slots * split.engines),
        rewards_idle=max(0.0, 1 - simulated.scoring / seconds / rules.reward_workers),
        staleness={staleness: count / tokens for staleness, count in sorted(simulated.staleness.items())},
        ready=sum(simulated.ready) / len(simulated.ready),
        outstanding=sum(simulated.outstanding) / len(simulated.outstanding),
        verdict=verdict_of(simulated.lines, simulated.takes),
    )
