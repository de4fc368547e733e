"""The decisions of the `GenerationQueue` as a state machine: no threads, no waiting, no engine.

Guarantees, whatever the order of events:
- every group that waits to be taken is expected at a take within `max_staleness` of its `submitted_version`. Admission
  sees to it; a rejection only moves groups forward; a retry is submitted at a newer version; and a take overtakes an
  unfinished group only if the bound still holds for that group;
- groups are taken in submission order, except for such overtaking;
- a rejected group is replaced at the end of the order; a failed attempt is tried again at its place in the order;
- every attempt and every prompt ends in exactly one outcome, and the numbers of outcomes add up;
- a token whose version cannot be true raises.
"""

import time
from collections.abc import Callable
from typing import Literal

from trl_a3po.errors import EngineError, GenerationFailed, StallError
from trl_a3po.protocol.engine import GroupEnd, GroupFailed, GroupRequest
from trl_a3po.protocol.records import Group, Prompt, Rejection, Score
from trl_a3po.rollout.left_out import reasons_in_words
from trl_a3po.rollout.outcomes import AttemptRecord, Ledger, OutcomeKind, Outcomes, outcome_name
from trl_a3po.rollout.outstanding import OutstandingPrompt, Stage
from trl_a3po.rollout.prompt_stream import PromptStream
from trl_a3po.rollout.queue_state import QueueState
from trl_a3po.rollout.take_order import BatchChoice, choose_batch
from trl_a3po.rollout.take_plan import TakePlan

Admission = Literal[
    "open", "total_takes", "max_staleness", "max_in_flight", "prompts", "end of data", "lag", "batch in the engine"
]


class QueueCore:
    """Events in, decisions out. It takes one caller at a time. The arguments are those of `GenerationQueue`."""

    def __init__(
        self,
        *,
        prompts: PromptStream,
        plan: TakePlan,
        num_rollouts: int,
        max_attempts: int,
        max_in_flight: int | None,
        max_rejected_in_a_row: int,
        replaces_groups: bool = True,
        attempt_ended: Callable[[AttemptRecord], None] = lambda attempt: None,
        runs_episodes: bool = False,
        new_tokens: Callable[[int], int | None] = lambda prompt_tokens: None,
        clock: Callable[[], float] = time.monotonic,
        running: Callable[[], float] = time.monotonic,
    ):
        self.prompts = prompts
        self.plan = plan
        self.num_rollouts = num_rollouts
        self.max_attempts = max_attempts
        self.max_in_flight = max_in_flight
        self.max_rejected_in_a_row = max_rejected_in_a_row
        self.replaces_groups = replaces_groups
        self.attempt_ended = attempt_ended
        self.runs_episodes = runs_episodes
        self.clock = clock  # of records
        self.running = running  # of ages and limits, which stands still while this process is stopped
        self.new_tokens = new_tokens
        self.order: list[OutstandingPrompt] = []
        self.next_take = 0
        self.published_version = 0
        self._first_version: int | None = None
        self._last_taken_version = 0
        self._requests = 0
        self._rejected_in_a_row = 0
        self._by_request: dict[int, OutstandingPrompt] = {}
        self._given_up: set[int] = set()  # request ids of attempts of which something may still be reported
        self._ledger = Ledger()

    # --- what is known ------------------------------------------------------------------------------------------

    def outcomes(self) -> Outcomes:
        return self._ledger.snapshot()

    def count(self, *stages: Stage) -> int:
        return sum(item.stage in stages for item in self.order)

    @property
    def capacity(self) -> int:
        """How many groups may wait to be taken now (see `TakePlan`)."""
        return self.plan.capacity(self.next_take, self.published_version)

    @property
    def takes_end(self) -> int:
        """Number of the first take that cannot happen, as far as is known."""
        if not self.prompts.source_ended:
            return self.plan.total_takes
        batches = (len(self.order) + self.prompts.buffered) // self.plan.groups_per_batch
        return min(self.plan.total_takes, self.next_take + batches)

    @property
    def end_reason(self) -> str | None:
        """Why there is no further take, `None` as long as there may be another one."""
        if self.next_take >= self.plan.total_takes:
            return f"All {self.plan.total_takes} takes of the run have been handed out."
        if self.next_take >= self.takes_end:
            left_out = f" Rows left out: {reasons_in_words(self.prompts.left_out)}." if self.prompts.left_out else ""
            return (
                f"The prompts ended after {self.prompts.cursor + self.prompts.buffered}: "
                f"{len(self.order) + self.prompts.buffered} are left for take {self.next_take}, which needs "
                f"{self.plan.groups_per_batch}.{left_out}"
            )
        return None

    @property
    def prompts_wanted(self) -> int:
        """How many prompts the stream should hold buffered: those that may be submitted before the main thread reads
        again, and no more, because a row may look otherwise later.

        These are what `max_staleness` admits now, in whole batches. A group that is rejected while the main thread
        trains leaves room for another one, which a batch in reserve fills at once; with `max_staleness=0` the main
        thread waits while groups are sampled, and reads the row then.
        """
        batch = self.plan.groups_per_batch
        trainable = (self.plan.total_takes - self.next_take) * batch
        reserve = batch if self.replaces_groups and self.plan.max_staleness > 0 else 0
        return max(0, min(self.capacity, trainable) - len(self.order)) + reserve

    def admission(self) -> Admission:
        """Whether another prompt may be submitted ("open"), or what holds it back.

        The bound on staleness is `TakePlan.capacity`. A batch is begun only when the prompts for all of it have been
        tokenised, so that no group is sampled for a batch that the data cannot complete. The prompts of an incomplete
        last batch stay as replacements.
        """
        position, batch = len(self.order), self.plan.groups_per_batch
        if position >= (self.plan.total_takes - self.next_take) * batch:
            return "total_takes"
        if position >= self.capacity:
            return "max_staleness"
        if position >= (position + self.prompts.buffered) // batch * batch:
            return "end of data" if self.prompts.source_ended else "prompts"
        if self.plan.lag is not None:
            return self._lagged_admission(position)
        if self.max_in_flight is not None and self.count("in the engine") >= self.max_in_flight:
            return "max_in_flight"
        return "open"

    def _lagged_admission(self, position: int) -> Admission:
        """With a `lag`: a batch is submitted under its own version, to an engine without other work. What is sampled,
        and which completions are decoded together, then does not depend on how long anything takes."""
        take = self.plan.expected_take(self.next_take, position)
        first_version = self.published_version if self._first_version is None else self._first_version
        if max(first_version, self.plan.lagged_version(take)) != self.published_version:
            return "lag"
        if position % self.plan.groups_per_batch == 0 and self.sampling:
            return "batch in the engine"
        return "open"

    @property
    def sampling(self) -> bool:
        """Some group is in the engine, or is about to be submitted to it again."""
        return self.count("to submit", "in the engine") > 0

    @property
    def settled(self) -> bool:
        """Everything that is to be sampled from the published version has been sampled. With a `lag`, the next version
        may then be published."""
        waits_for_this_version = self.admission() in ("open", "prompts", "batch in the engine")
        return not self.sampling and not waits_for_this_version

    @property
    def scoring(self) -> bool:
        """Some group waits for its reward."""
        return self.count("waiting for its reward", "being scored") > 0

    def choice(self) -> BatchChoice:
        """What the next take would hand out now."""
        # With a lag, a batch is trained as it was sampled: no group of a later batch takes the place of one of them.
        order = self.order if self.plan.lag is None else self.order[: self.plan.groups_per_batch]
        return choose_batch(
            [item.stage == "ready" for item in order],
            [item.submitted_version for item in order],
            plan=self.plan,
            next_take=self.next_take,
            takes_end=self.takes_end,
        )

    # --- events -------------------------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """Note that the engine samples from `version` now."""
        if version < self.published_version:
            raise ValueError(f"Version {version} was published after version {self.published_version}.")
        if self.plan.lag is not None and self._first_version is not None and self.sampling:
            raise ValueError(
                f"Version {version} was published while groups of version {self.published_version} were being "
                "sampled, which schedule='fixed_lag' does not allow: publish when `settled`."
            )
        self.published_version = version
        if self._first_version is None:
            self._first_version = version

    def submissions(self) -> list[GroupRequest]:
        """The requests to submit to the engine now: retries first, then new prompts as far as admission allows."""
        trainable = (self.plan.total_takes - self.next_take) * self.plan.groups_per_batch
        requests = [self._submit(item) for item in self.order[:trainable] if item.stage == "to submit"]
        while self.admission() == "open":
            prompt, now = self.prompts.pop(), self.running()
            self._ledger.prompt_popped(prompt.index)
            item = OutstandingPrompt(prompt, popped_at=now, stage_entered_at=now)
            self.order.append(item)
            requests.append(self._submit(item))
        return requests

    def engine_event(self, event: GroupEnd) -> None:
        """Handle the end of a request in the engine.

        Raises:
            EngineError: no request with this id is outstanding, or the number of rollouts is wrong.
            StampError: a token is older than the version published when the attempt was submitted.
            GenerationFailed: it was the last attempt that the prompt may have.
        """
        if event.request_id in self._given_up:
            return
        item = self._by_request.get(event.request_id)
        if item is None or item.stage != "in the engine":
            raise EngineError(
                f"The engine reported request {event.request_id}, which is not outstanding there: every request must "
                "end in exactly one event."
            )
        if isinstance(event, GroupFailed):
            self._attempt_failed(item, event.reason)
        else:
            item.receive(event, self.num_rollouts, lagged=self.plan.lag is not None)
            self._enter_stage(item, "waiting for its reward")

    def next_to_score(self) -> tuple[int, Group] | None:
        """The oldest group that waits for its reward, with its request id; its stage is now "being scored". `None` if
        there is no such group. With a `lag`, groups are scored in submission order, so that reward functions with a
        state see the same groups in the same order in every run."""
        for item in self.order:
            if item.stage == "waiting for its reward":
                self._enter_stage(item, "being scored")
                return item.request_id, item.finished_group
            if self.plan.lag is not None and item.stage in ("to submit", "in the engine"):
                return None
        return None

    def scoring_seconds(self) -> float:
        """The longest time for which a group has been scored until now; 0 if no group is being scored."""
        now = self.running()
        return max((now - item.stage_entered_at for item in self.order if item.stage == "being scored"), default=0.0)

    def record_score(self, request_id: int, result: Score | Group | Rejection) -> None:
        """Handle the result of scoring a group: its score, the group to train on instead, or a rejection.

        Raises:
            StallError: too many groups in a row were rejected.
        """
        if request_id in self._given_up:
            return
        item = self._by_request[request_id]
        if isinstance(result, Rejection):
            if self.plan.lag is not None:
                raise GenerationFailed(
                    f"The group of prompt {item.prompt.index} was rejected ({result.reason}), and "
                    "schedule='fixed_lag' cannot replace it, because a batch is sampled as a whole. Accept the group, "
                    "or set schedule='async'."
                )
            self._reject(item, result.reason, result.remedy)
            return
        if isinstance(result, Group):
            item.set_group(result)
        else:
            item.finished_group.score = result
        self._rejected_in_a_row = 0
        self._enter_stage(item, "ready")

    def sample_again(self, since: float, reason: str) -> list[int]:
        """Give up every attempt that was in the engine at the time `since` or later, and have its prompt sampled again
        at its place in the order. Returns the ids of the requests that are still in the engine."""
        in_engine = []
        for item in self.order:
            if not item.was_in_engine(since):
                continue
            if item.stage == "in the engine":
                in_engine.append(item.request_id)
            self._given_up.add(item.request_id)
            self._end_attempt(item, "unused", reason)
            item.forget_group()
            self._enter_stage(item, "to submit")
        return in_engine

    def try_take(self, version: int) -> list[Group] | None:
        """The next batch, in submission order, taken at policy version `version`; `None` if the take has to wait.

        Raises:
            ValueError: this take may not happen at `version`.
            StampError: a token claims a version newer than the trainer's.
        """
        self._check_take_version(version)
        self._reject_for_age(version)
        batch = [self.order[position] for position in self.choice().positions]
        if not batch:
            return None
        for item in batch:
            item.check_taken_at(version)
        for item in batch:
            self._leave(item, "trained", taken_version=version)
        self.next_take += 1
        self._last_taken_version = version
        return [item.finished_group for item in batch]

    def close(self) -> list[int]:
        """Record every outstanding prompt as unused, and return the ids of the requests still in the engine."""
        in_engine = [item.request_id for item in self.order if item.stage == "in the engine"]
        for item in list(self.order):
            self._leave(item, "unused")
        return in_engine

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state(self) -> QueueState:
        """A snapshot from which another process can continue. What is in the engine now is sampled again there."""
        outcomes = self._ledger.snapshot().with_unused(self.count("in the engine"), "cut off, sampled again")
        return QueueState(
            next_take=self.next_take,
            cursor=self.prompts.cursor,
            published_version=self.published_version,
            last_taken_version=self._last_taken_version,
            rejected_in_a_row=self._rejected_in_a_row,
            outcomes=outcomes,
            outstanding=[item.state() for item in self.order],
            left_out=self.prompts.left_out_before_cursor,
        )

    def restore(self, state: QueueState, prompts: dict[int, Prompt], version: int) -> None:
        """Continue from `state`, with an engine that samples from `version`. Call it before any other event.

        Args:
            prompts: index -> outstanding prompt, as the prompt stream has it now.

        Raises:
            ValueError: a prompt has changed, or a group would be older than `max_staleness` when it is taken.
        """
        order = [
            OutstandingPrompt.restored(item, prompts[item.prompt_index], self.running()) for item in state.outstanding
        ]
        for position, item in enumerate(order):
            take = self.plan.expected_take(state.next_take, position)
            self._check_age(take, version if item.group is None else item.submitted_version)
        # Nothing raises from here on: a queue that is closed after an error above has nothing to record.
        self.next_take = state.next_take
        self._last_taken_version = state.last_taken_version
        self._rejected_in_a_row = state.rejected_in_a_row
        self.order = order
        for item in order:
            if item.group is not None:
                self._assign_request_id(item)
        open_prompts = [item.prompt.index for item in self.order]
        self._ledger = Ledger.restored(state.outcomes, open_prompts, self._by_request)

    def _check_age(self, take: int, submitted_version: int) -> None:
        """Raise `ValueError` for a group that would be too old for `take`, at which it is expected."""
        if take < self.plan.total_takes and not self.plan.in_bound(take, submitted_version):
            raise ValueError(
                f"The checkpoint holds a group of version {submitted_version} for the take at version "
                f"{self.plan.version_of_take(take)}, which max_staleness={self.plan.max_staleness} does not allow: "
                "resume with at least the max_staleness of that run."
            )

    # --- steps of the events ------------------------------------------------------------------------------------

    def _enter_stage(self, item: OutstandingPrompt, stage: Stage) -> None:
        item.stage = stage
        item.stage_entered_at, item.stage_times[stage] = self.running(), self.clock()

    def _assign_request_id(self, item: OutstandingPrompt) -> None:
        item.request_id, self._requests = self._requests, self._requests + 1
        self._by_request[item.request_id] = item

    def _submit(self, item: OutstandingPrompt) -> GroupRequest:
        self._assign_request_id(item)
        item.attempt += 1
        item.stage_times.clear()
        item.submitted_version = self.published_version
        self._ledger.attempt_submitted(item.request_id)
        self._enter_stage(item, "in the engine")
        return GroupRequest(
            request_id=item.request_id,
            noise_key=item.prompt.index,
            prompt_ids=tuple(item.prompt.token_ids),
            num_rollouts=self.num_rollouts,
            max_new_tokens=None if self.runs_episodes else self.new_tokens(len(item.prompt.token_ids)),
            images=item.prompt.images,
            row=item.prompt.example if self.runs_episodes else None,
        )

    def _attempt_failed(self, item: OutstandingPrompt, reason: str) -> None:
        self._end_attempt(item, "failed", reason)
        item.failures.append(reason)
        if len(item.failures) < self.max_attempts:
            self._enter_stage(item, "to submit")
            return
        self.order.remove(item)
        self._ledger.end_prompt(item.prompt.index, "failed", reason)
        raise GenerationFailed(
            f"Prompt {item.prompt.index} failed {len(item.failures)} times, which is the limit "
            f"(max_attempts={self.max_attempts}): "
            + "; ".join(f"attempt {number}: {reason}" for number, reason in enumerate(item.failures, start=1))
        )

    def _check_take_version(self, version: int) -> None:
        planned = self.plan.version_of_take(self.next_take)
        if version > planned:
            raise ValueError(
                f"Take {self.next_take} happens at version {version}, but version_of_take({self.next_take}) is "
                f"{planned}: groups were admitted for that version and would be older than "
                f"max_staleness={self.plan.max_staleness} allows. version_of_take must not return too low a version."
            )
        least = max(self._last_taken_version, self.published_version)
        if version < least:
            raise ValueError(
                f"Take {self.next_take} happens at version {version}, but version {least} has been taken or "
                "published already: the trainer's version cannot go back."
            )

    def _reject_for_age(self, version: int) -> None:
        for item in list(self.order):
            old = item.oldest is not None and version - item.oldest > self.plan.max_staleness
            if old and item.stage == "ready":
                self._reject(item, "older than max_staleness", "raise max_staleness")

    def _reject(self, item: OutstandingPrompt, reason: str, remedy: str) -> None:
        self._leave(item, "rejected", reason)
        self._rejected_in_a_row += 1
        if self._rejected_in_a_row > self.max_rejected_in_a_row:
            raise StallError(
                f"{self._rejected_in_a_row} groups in a row were rejected, the last one because: {reason}. "
                f"No batch can be filled this way (max_rejected_groups_in_a_row={self.max_rejected_in_a_row}): "
                f"{remedy}."
            )

    def _leave(
        self, item: OutstandingPrompt, kind: OutcomeKind, reason: str | None = None, taken_version: int | None = None
    ) -> None:
        self.order.remove(item)
        if item.stage != "to submit":  # between two attempts there is no attempt to end
            self._end_attempt(item, kind, reason, taken_version)
        self._ledger.end_prompt(item.prompt.index, kind, reason)

    def _end_attempt(
        self, item: OutstandingPrompt, kind: OutcomeKind, reason: str | None = None, taken_version: int | None = None
    ) -> None:
        self._ledger.end_attempt(item.request_id, kind, reason)
        del self._by_request[item.request_id]
        self.attempt_ended(item.record(outcome_name(kind, reason), taken_version, self.clock()))
