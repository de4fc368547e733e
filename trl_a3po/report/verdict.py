"""What limits a run, in plain words, with the setting to change.

Guarantees: pure; every verdict follows from the numbers that its sentence names. A part of the pipeline limits a run
only if that part is busy nearly all the time; where no part is, the parts are kept from working at the same time.
"""

from dataclasses import dataclass
from typing import Any, Literal

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
        sentence: what was measured, and what to do.
        setting: the setting of `A3POConfig` to change, `None` if there is none.
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
    if numbers.max_staleness > 0 and numbers.engine_fill is not None and numbers.engine_fill < TINY:
        return _tiny_queue(numbers)
    if max(numbers.engine_busy, numbers.rewards_busy) < BUSY:
        return _max_staleness(numbers)
    return _rewards(numbers) if numbers.waiting_for_rewards > numbers.waiting / 2 else _generation(numbers)


def _publishing(numbers: RunNumbers) -> Verdict:
    return Verdict(
        "publishing",
        f"Publish-bound: {numbers.publishing:.0%} of the time went into sending weights to the engine. Publish less "
        "often (weight_sync_steps), or smaller updates (lora_sync='adapter').",
        "weight_sync_steps",
    )


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
    return Verdict(
        "training",
        f"Training-bound: the trainer waited only {numbers.waiting:.0%} of the time, and the engine had work only "
        f"{numbers.engine_busy:.0%} of the time. Make training faster: larger micro-batches "
        "(per_device_train_batch_size), or more devices. Fewer devices for the engine cost no time.",
        "per_device_train_batch_size",
    )


def _straggler(numbers: RunNumbers) -> Verdict:
    waited = (
        f"Starved by stragglers: in {numbers.waiting_for_stragglers:.0%} of the time, the rest of the batch was ready "
        f"and the trainer waited for a group whose {numbers.slowest_phase} took more than {STRAGGLER:g} times the "
        "median."
    )
    if numbers.slowest_phase == "scoring":
        return Verdict(
            "straggler",
            f"{waited} Bound the rewards' time (reward_timeout, with reward_workers), or raise max_staleness, which "
            "lets other groups be trained first.",
            "reward_timeout",
        )
    return Verdict(
        "straggler",
        f"{waited} Raise max_staleness, which lets other groups be trained first, or bound the length of completions "
        "(max_completion_length).",
        "max_staleness",
    )


def _rewards(numbers: RunNumbers) -> Verdict:
    workers = f"reward_workers={numbers.reward_workers}" if numbers.reward_workers else "one thread (reward_workers=0)"
    return Verdict(
        "rewards",
        f"Reward-bound: the trainer waited {numbers.waiting:.0%} of the time, mostly for rewards; {workers} worked "
        f"{numbers.rewards_busy:.0%} of the time. Score more groups at a time (reward_workers), or make the reward "
        "functions faster.",
        "reward_workers",
    )


def _tiny_queue(numbers: RunNumbers) -> Verdict:
    admitted = (numbers.max_staleness + 1) * numbers.groups_per_batch
    return Verdict(
        "tiny queue",
        f"Tiny queue: the trainer waited {numbers.waiting:.0%} of the time, while {numbers.engine_fill:.0%} of the "
        f"engine's {numbers.engine_slots} slots were in use: max_staleness={numbers.max_staleness} admits about "
        f"{admitted} groups of {numbers.num_generations}, with batches of {numbers.groups_per_batch}. "
        "Have more groups in flight: raise max_staleness or generation_batch_size.",
        "max_staleness",
    )


def _max_staleness(numbers: RunNumbers) -> Verdict:
    waited = (
        f"the trainer waited {numbers.waiting:.0%} of the time, although the engine had work only "
        f"{numbers.engine_busy:.0%} of the time: each waits for the other"
    )
    if numbers.schedule in ("sync", "periodic"):
        return Verdict(
            "max_staleness",
            f"Held back by schedule='{numbers.schedule}': {waited}. With schedule='async' both work at the same time.",
            "schedule",
        )
    return Verdict(
        "max_staleness",
        f"Held back by max_staleness={numbers.max_staleness}: {waited}. Raise max_staleness, and the engine runs "
        "further ahead.",
        "max_staleness",
    )


def _generation(numbers: RunNumbers) -> Verdict:
    waited = (
        f"Generation-bound: the trainer waited {numbers.waiting:.0%} of the time, and the engine had work "
        f"{numbers.engine_busy:.0%} of the time."
    )
    shorter = "make completions shorter (max_completion_length)"
    if numbers.engine == "vllm" and numbers.engine_slots is None:
        return Verdict(
            "generation", f"{waited} Add vLLM servers (vllm_server_urls), or {shorter}.", "vllm_server_urls"
        )
    faster = ", use engine='vllm'" if numbers.engine == "transformers" else ""
    return Verdict(
        "generation",
        f"{waited} Give the engine devices of its own (engine_device){faster}, or {shorter}.",
        "engine_device",
    )
