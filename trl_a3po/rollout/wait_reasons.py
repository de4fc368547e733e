"""Why the queue waits, in words: a snapshot for any thread, and the message of a wait that reached its timeout."""

from dataclasses import dataclass

from trl_a3po.rollout.outstanding import OutstandingPrompt
from trl_a3po.rollout.queue_core import QueueCore
from trl_a3po.workers.thread_stacks import thread_stacks


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """What the queue holds and why either side waits. Ages and times in seconds.

    Args:
        in_engine: groups being sampled, including those about to be submitted to the engine.
        waiting_for_reward: sampled groups whose reward is not known yet, including those being scored.
        ready: scored groups that wait to be taken (the queue's depth).
        capacity: groups that may be outstanding besides the batch in training.
        published_version: the version the engine samples from.
        next_take: number of the next take, 0-based.
        next_take_version: the version at which the next take happens, `None` after the last take.
        producer: why no further prompt is submitted, or that the next prompt can be.
        consumer: what the next take waits for, or that it has its groups.
        oldest: the oldest outstanding prompt and the stage it has reached.
        take_seconds: time that all takes so far have waited.
        staleness_blocked_seconds: time that `max_staleness` has held the next prompt back.
    """

    in_engine: int
    waiting_for_reward: int
    ready: int
    capacity: int
    published_version: int
    next_take: int
    next_take_version: int | None
    producer: str
    consumer: str
    oldest: str
    take_seconds: float
    staleness_blocked_seconds: float

    @property
    def outstanding(self) -> int:
        """Groups submitted and not yet taken."""
        return self.in_engine + self.waiting_for_reward + self.ready

    def __str__(self) -> str:
        take = (
            "no take is left"
            if self.next_take_version is None
            else f"next take {self.next_take}, at version {self.next_take_version}"
        )
        return (
            f"outstanding: {self.in_engine} in the engine, {self.waiting_for_reward} waiting for their reward, "
            f"{self.ready} ready (capacity {self.capacity})\n"
            f"versions: published {self.published_version}; {take}\n"
            f"submitting: {self.producer}\n"
            f"taking: {self.consumer}\n"
            f"oldest prompt: {self.oldest}\n"
            f"waited so far: take {self.take_seconds:.1f} s; submission, because of max_staleness, "
            f"{self.staleness_blocked_seconds:.1f} s"
        )


def queue_status(core: QueueCore, take_seconds: float, staleness_blocked_seconds: float) -> QueueStatus:
    """The snapshot; the caller holds the lock."""
    over = core.next_take >= core.plan.total_takes
    return QueueStatus(
        in_engine=core.count("to submit", "in the engine"),
        waiting_for_reward=core.count("waiting for its reward", "being scored"),
        ready=core.count("ready"),
        capacity=core.capacity,
        published_version=core.published_version,
        next_take=core.next_take,
        next_take_version=None if over else core.plan.version_of_take(core.next_take),
        producer=producer_reason(core),
        consumer=consumer_reason(core),
        oldest=_oldest(core),
        take_seconds=take_seconds,
        staleness_blocked_seconds=staleness_blocked_seconds,
    )


def producer_reason(core: QueueCore) -> str:
    """Why no further prompt is submitted."""
    match core.admission():
        case "open":
            return "the next prompt can be submitted"
        case "total_takes":
            return f"every group of the run's {core.plan.total_takes} takes is outstanding or has been taken"
        case "max_staleness":
            version = core.plan.version_of_take(core.plan.expected_take(core.next_take, len(core.order)))
            return (
                f"waiting for a publish: the next group would be trained at version {version}, "
                f"beyond the published version {core.published_version} + max_staleness {core.plan.max_staleness}"
            )
        case "lag":
            return "waiting for a publish: with schedule='fixed_lag' the next batch belongs to the next version"
        case "batch in the engine":
            return "waiting for the engine: with schedule='fixed_lag' it samples one batch at a time"
        case "max_in_flight":
            return f"waiting for the engine: max_in_flight={core.max_in_flight} groups are being sampled"
        case "prompts":
            return "waiting for prompts to be tokenised on the main thread"
        case "end of data":
            return f"the prompts have ended; {core.prompts.buffered} are kept as replacements"


def consumer_reason(core: QueueCore) -> str:
    """What the next take waits for."""
    if core.end_reason is not None:
        return core.end_reason
    choice = core.choice()
    name = f"take {core.next_take}"
    if choice.deadline is not None:
        item = core.order[choice.deadline]
        return (
            f"{name} waits for prompt {item.prompt.index} ({_progress(core, item)}), which may not be overtaken: "
            f"submitted at version {item.submitted_version}, it could not be trained within "
            f"max_staleness={core.plan.max_staleness} at a later take"
        )
    if not choice.missing:
        return f"{name} has all of its groups"
    short = core.plan.groups_per_batch - len(core.order)
    rest = f"; {short} of them are not submitted yet" if short > 0 else ""
    return f"{name} waits for {choice.missing} of its {core.plan.groups_per_batch} groups{rest}"


def starvation_reason(core: QueueCore) -> str | None:
    """Why the take in which the main thread waits can never be filled, `None` if it can.

    Only the main thread publishes, so a take whose groups may not be submitted before the next publish waits for
    itself.
    """
    if len(core.order) >= core.plan.groups_per_batch or core.admission() not in ("max_staleness", "lag"):
        return None
    if core.plan.lag is not None:
        return (
            f"Take {core.next_take} needs groups of version {core.plan.lagged_version(core.next_take)} "
            f"(schedule='fixed_lag'), but the published version is {core.published_version}: publish the weights of "
            "every take before it."
        )
    return (
        f"Take {core.next_take} happens at version {core.plan.version_of_take(core.next_take)}, but the published "
        f"version is {core.published_version} and max_staleness={core.plan.max_staleness}, so its groups may not be "
        "submitted and the take would never end: lower weight_sync_steps or raise max_staleness "
        "(weight_sync_steps - gcd(weight_sync_steps, optimizer steps per batch) must not exceed it)."
    )


def stall_report(status: QueueStatus, seconds: float, engine: str, doing: str) -> str:
    """The message of a `StallError` after `seconds` without an event or a token.

    Args:
        engine: what the engine has done since the last event.
        doing: what the reward functions or the episodes are doing and what would help if they hang, or empty.
    """
    advice = doing or "If the engine or the reward functions need longer than that for one group, raise stall_timeout."
    return (
        f"Nothing has happened for {seconds:.1f} s (stall_timeout): {status.consumer}. {advice}\n"
        f"{status}\nengine: {engine}\n{thread_stacks()}"
    )


def overdue_report(status: QueueStatus, seconds: float, timeout: float, scoring: str) -> str:
    """The message of a `StallError` when scoring one group in a thread has taken `seconds`."""
    advice = scoring or (
        "Set reward_workers=1 or more, which runs the reward functions in processes that are killed at reward_timeout "
        "and replaced, or raise reward_timeout."
    )
    return (
        f"The reward functions have worked on one group for {seconds:.1f} s, longer than reward_timeout={timeout:g} "
        f"s: "
        f"{status.consumer}. {advice}\n{status}\n{thread_stacks()}"
    )


def _oldest(core: QueueCore) -> str:
    if not core.order:
        return "none"
    item = min(core.order, key=lambda other: other.popped_at)
    return f"prompt {item.prompt.index}, {core.running() - item.popped_at:.1f} s old ({_progress(core, item)})"


def _progress(core: QueueCore, item: OutstandingPrompt) -> str:
    failed = f", failed before: {'; '.join(item.failures)}" if item.failures else ""
    return f"attempt {item.attempt}, {item.stage} for {core.running() - item.stage_entered_at:.1f} s{failed}"
