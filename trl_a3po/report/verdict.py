"""What limits a run, in plain words, with the setting to change.

Guarantees: pure; every verdict follows from the numbers that its sentence names. A part of the pipeline limits a run
only if that part is busy nearly all the time; where no part is, the parts are kept from working at the same time.
"""

from dataclasses import dataclass
from typing import Any, Literal

from trl_a3po.report import advice
from trl_a3po.report.advice import Advice
from trl_a3po.report.run_numbers import STRAGGLER, RunNumbers, run_numbers

Limit = Literal[
    "generation", "training", "rewards", "straggler", "max_staleness", "tiny queue", "publishing", "balanced"
]

WAITS = 0.2  # share of the time, from which the trainer counts as waiting
PUBLISHES = 0.3  # share of the time, from which publishing counts as slow
BUSY = 0.8  # share of the time, from which a part of the pipeline has no time left
HALF_BUSY = 0.6  # share of the time, below which generation and rewards keep up with training easily
TINY = 0.25  # of the engine's slots, below which the engine is nearly empty


@dataclass(frozen=True)
class Verdict:
    """What limits a run.

    Args:
        limit: which part, in one or two words.
        sentence: what was measured, and what to do, with what that costs.
        setting: the setting of `A3POConfig` to change first, `None` if there is none.
    """

    limit: Limit
    sentence: str
    setting: str | None


def verdict_of(lines: list[dict[str, Any]], last_takes: int | None = None) -> Verdict | None:
    """The verdict on a run, from the lines that `read_timeline` returns; `None` if there are too few to tell."""
    numbers = run_numbers(lines, last_takes)
    return None if numbers is None else verdict(numbers)


def verdict(numbers: RunNumbers) -> Verdict:
    """The verdict that follows from these numbers."""
    if numbers.publishing >= max(PUBLISHES, numbers.waiting):
        return _publishing(numbers)
    if numbers.waiting < WAITS:
        return _without_waiting(numbers)
    if numbers.waiting_for_stragglers > numbers.waiting / 2:
        return _straggler(numbers)
    if numbers.waiting_for_rewards > numbers.waiting / 2 and numbers.rewards_busy >= BUSY:
        return _rewards(numbers)
    if numbers.settings.max_staleness > 0 and numbers.engine_fill is not None and numbers.engine_fill < TINY:
        return _tiny_queue(numbers)
    if max(numbers.engine_busy, numbers.rewards_busy) < BUSY:
        return _held_back(numbers)
    return _rewards(numbers) if numbers.waiting_for_rewards > numbers.waiting / 2 else _generation(numbers)


def _with_advice(limit: Limit, measured: str, found: tuple[list[Advice], str]) -> Verdict:
    """The verdict with every piece of advice, or with the sentence for a run that there is none for."""
    pieces, otherwise = found
    words = " ".join(piece.sentence for piece in pieces) or otherwise
    return Verdict(limit, f"{measured} {words}", pieces[0].setting if pieces else None)


def _publishing(numbers: RunNumbers) -> Verdict:
    measured = f"Publish-bound: {numbers.publishing:.0%} of the time went into sending weights to the engine."
    return _with_advice("publishing", measured, advice.for_publishing(numbers))


def _without_waiting(numbers: RunNumbers) -> Verdict:
    if max(numbers.engine_busy, numbers.rewards_busy) >= HALF_BUSY:
        busy = f"the engine had work {numbers.engine_busy:.0%} of the time"
        if numbers.rewards_busy > numbers.engine_busy:
            busy = f"rewards were computed {numbers.rewards_busy:.0%} of the time"
        return Verdict(
            "balanced",
            f"Balanced: the trainer waited {numbers.waiting:.0%} of the time, and {busy}. To go faster, both sides "
            "need more.",
            None,
        )
    measured = (
        f"Training-bound: the trainer waited only {numbers.waiting:.0%} of the time, and the engine had work only "
        f"{numbers.engine_busy:.0%} of the time.{advice.cheaper_engine(numbers)}"
    )
    return _with_advice("training", measured, advice.for_training(numbers))


def _straggler(numbers: RunNumbers) -> Verdict:
    measured = (
        f"Starved by stragglers: in {numbers.waiting_for_stragglers:.0%} of the time, the rest of the batch was ready "
        f"and the trainer waited for a group whose {numbers.slowest_phase} took more than {STRAGGLER:g} times the "
        "median."
    )
    if numbers.slowest_phase == "sampling" and numbers.stragglers_are_long is False:
        measured += " Their length does not explain it, so look into the engine."
    return _with_advice("straggler", measured, advice.for_stragglers(numbers))


def _rewards(numbers: RunNumbers) -> Verdict:
    count = numbers.settings.reward_workers
    by = f"reward_workers={count}" if count else "the background thread that runs them (reward_workers=0: no process)"
    measured = (
        f"Reward-bound: the trainer waited {numbers.waiting:.0%} of the time, mostly for rewards, and {by} had work "
        f"{numbers.rewards_busy:.0%} of the time."
    )
    return _with_advice("rewards", measured, advice.for_rewards(numbers))


def _tiny_queue(numbers: RunNumbers) -> Verdict:
    run = numbers.settings
    groups = (run.max_staleness + 1) * run.groups_per_batch
    batch = "1 group" if run.groups_per_batch == 1 else f"{run.groups_per_batch} groups"
    measured = (
        f"Tiny queue: the trainer waited {numbers.waiting:.0%} of the time, while {numbers.engine_fill:.0%} of the "
        f"engine's {run.engine_slots} slots were in use. A batch is {batch} of {run.num_generations} completions, and "
        f"max_staleness={run.max_staleness} admits about {groups} groups."
    )
    return _with_advice("tiny queue", measured, advice.for_more_ahead(numbers))


def _held_back(numbers: RunNumbers) -> Verdict:
    run = numbers.settings
    by = f"schedule='{run.schedule}'" if run.schedule in ("sync", "periodic") else f"max_staleness={run.max_staleness}"
    measured = (
        f"Held back by {by}: the trainer waited {numbers.waiting:.0%} of the time, although the engine had work only "
        f"{numbers.engine_busy:.0%} of the time: each waits for the other."
    )
    return _with_advice("max_staleness", measured, advice.for_more_ahead(numbers))


def _generation(numbers: RunNumbers) -> Verdict:
    measured = (
        f"Generation-bound: the trainer waited {numbers.waiting:.0%} of the time, and the engine had work "
        f"{numbers.engine_busy:.0%} of the time."
    )
    return _with_advice("generation", measured, advice.for_generation(numbers))
