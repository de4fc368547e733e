"""The `GenerationQueue`: prompts go in, batches of scored groups come out, sampled ahead of training within a bound.

Guarantees:
- what is outstanding is bounded by `max_staleness` (see `take_plan.TakePlan`), and `take` hands groups out in
  submission order (see `take_order`); what became of every prompt is on the books (see `outcomes`);
- dataset, tokenizer and `publish` are touched by the main thread only, whose side this file is; the engine's other
  calls and the reward functions by background threads only (see `threads`);
- no lock is held while the engine, the reward functions or the tokenizer work;
- every wait has a limit, and whatever goes wrong in the background is raised by the next `take`, with its cause.

`max_staleness` 0 is the schedule "sync": nothing is sampled before the weights it will be trained with are published.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from trl_a3po.errors import EndOfData, StallError
from trl_a3po.protocol.engine import Engine
from trl_a3po.protocol.records import Group, Rejection, Rollout, Score
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.rollout.core import QueueCore
from trl_a3po.rollout.outcomes import Attempt, Outcomes
from trl_a3po.rollout.prompt_stream import PromptStream
from trl_a3po.rollout.queue_state import QueueState
from trl_a3po.rollout.shared_state import Shared
from trl_a3po.rollout.side_requests import SideRequests
from trl_a3po.rollout.take_plan import TakePlan
from trl_a3po.rollout.threads import background_threads
from trl_a3po.rollout.waiting import QueueStatus, overdue_report, queue_status, stall_report, starved

logger = logging.getLogger(__name__)

WAITING_TOLD_SECONDS = 10.0
OVERDUE_CLOSE_SECONDS = 0.5  # for a score that is known to hang


class GenerationQueue:
    """Keeps an engine busy ahead of training.

    Args:
        engine: a started engine; the queue neither starts nor closes it.
        prompts: the prompt stream; the queue is its only user.
        score: group -> its rewards, or the group to train on instead, scored, or a `Rejection`, which has it replaced
            by another prompt.
        groups_per_batch: B, the groups one take hands out.
        num_rollouts: G, the rollouts of a group.
        max_staleness: largest staleness of a trained token, in optimizer steps; 0 never samples ahead.
        version_of_take: take number n of this run (0-based) -> the policy version it happens at, nondecreasing. A
            take may happen at a lower version than promised, never at a higher one.
        total_takes: takes of the run; nothing is submitted for a later one.
        lag: `schedule="fixed_lag"`: how many takes before its own every batch is sampled, as one message to an engine
            without other work; `None` samples whatever `max_staleness` allows.
        max_attempts: attempts at a prompt before the run stops with `GenerationFailed`.
        stall_timeout: seconds without any event after which a waiting `take` raises `StallError`.
        max_in_flight: most groups in the engine at a time; `None` leaves that to `max_staleness`.
        max_rejected_in_a_row: groups rejected in a row before the run stops with `StallError`; `None` is 10 batches.
        close_timeout: seconds `close` waits for the background threads before it abandons them.
        score_threads: threads that score, a group each.
        score_timeout: seconds scoring a group may take before a `take` that waits raises `StallError`.
        interrupt_score: has scores under way end early, with whatever error; called by `close`.
        attempt_ended: told of each attempt that ended, by any thread, under the queue's lock: it must not wait.
        describe_score: what the reward functions are at and what would help if they hang, for a report; or empty.
        while_waiting: called by a main thread that waits, every now and then, at least every 20 seconds.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        prompts: PromptStream,
        score: Callable[[Group], Score | Group | Rejection],
        groups_per_batch: int,
        num_rollouts: int,
        max_staleness: int,
        version_of_take: Callable[[int], int],
        total_takes: int,
        lag: int | None = None,
        max_attempts: int = 3,
        stall_timeout: float = 600.0,
        max_in_flight: int | None = None,
        max_rejected_in_a_row: int | None = None,
        close_timeout: float = 5.0,
        score_threads: int = 1,
        score_timeout: float | None = None,
        interrupt_score: Callable[[], None] | None = None,
        attempt_ended: Callable[[Attempt], None] = lambda attempt: None,
        describe_score: Callable[[], str] = lambda: "",
        while_waiting: Callable[[], None] = lambda: None,
    ):
        _require_positive(num_rollouts=num_rollouts, max_attempts=max_attempts, stall_timeout=stall_timeout)
        _require_positive(score_threads=score_threads)
        if max_in_flight is not None:
            _require_positive(max_in_flight=max_in_flight)
        if score_timeout is not None:
            _require_positive(score_timeout=score_timeout)
        self._engine = engine
        self._prompts = prompts
        self._stall_timeout = stall_timeout
        self._close_timeout = close_timeout
        self._score_timeout = score_timeout
        self._interrupt_score = interrupt_score
        self._describe_score = describe_score
        self._while_waiting = while_waiting
        self._waiting_told = time.monotonic()
        core = QueueCore(
            prompts=prompts,
            plan=TakePlan(groups_per_batch, max_staleness, version_of_take, total_takes, lag),
            num_rollouts=num_rollouts,
            max_attempts=max_attempts,
            max_in_flight=max_in_flight,
            max_rejected_in_a_row=10 * groups_per_batch if max_rejected_in_a_row is None else max_rejected_in_a_row,
            attempt_ended=attempt_ended,
        )
        self._core, self._shared = core, Shared(core)
        self._changed = self._shared.changed  # guards the core and everything below
        self._background = background_threads(
            self._shared, engine, score, score_threads, cut_off=interrupt_score is not None
        )
        self._threads: list[threading.Thread] = []
        self._taking_since: float | None = None
        self._take_seconds = 0.0

    # --- the main thread ----------------------------------------------------------------------------------------

    def start(self, version: int) -> None:
        """Begin to submit; the engine samples from `version`. Main thread only."""
        if self._threads:
            raise RuntimeError("The queue was started already.")
        self._shared.raise_if_over()
        self._published(version)
        self._threads = self._background
        for thread in self._threads:
            thread.start()

    def restore(self, state: QueueState, version: int) -> None:
        """Go on where another process saved `state`, from an engine that samples from `version`. Main thread only,
        before `start(version)`; the prompt stream begins at `state.first_row`.

        Raises:
            ValueError: the prompts are not those of that process, or `max_staleness` is too small for its groups.
        """
        if self._threads:
            raise RuntimeError("restore was called after start.")
        prompts = self._prompts.recall(state.cursor, {item.prompt_index for item in state.outstanding})
        with self._changed:
            self._core.restore(state, prompts, version)

    def state(self) -> QueueState:
        """A snapshot to `restore` from; the queue goes on. With a `lag` it first waits for the batch in the engine and
        its rewards, so that nothing is cut off.

        Raises:
            EngineError, RewardError, GenerationFailed, StampError: what stopped the background work.
            QueueClosed: the queue is closed.
        """
        self._settle(scored=True)
        with self._changed:
            self._shared.raise_if_over()
            return self._core.state()

    def publish(self, update: WeightUpdate) -> None:
        """Publish `update` to the engine and let admission follow. Main thread only.

        With a `lag` it first waits for what belongs to the version published before.

        Raises:
            EngineError: the engine could not take the weights.
            StallError: `stall_timeout` seconds of that wait passed without an event.
        """
        self._shared.raise_if_over()
        self._settle()
        self._engine.publish(update)
        self._published(update.version)

    def published(self, version: int) -> None:
        """Let admission follow a publish that the caller has made itself. Main thread only."""
        self._shared.raise_if_over()
        self._published(version)

    def take(self, version: int) -> list[Group]:
        """The next B groups, in submission order, to be trained at policy version `version`. Main thread only.

        Waits for them, and meanwhile tokenises the prompts that submission needs.

        Raises:
            EndOfData: there is no further batch.
            StallError: `stall_timeout` seconds passed without an event, a score is overdue, or the settings can never
                fill this take.
            EngineError, RewardError, GenerationFailed, StampError: what stopped the background work, with its cause.
            QueueClosed: the queue is closed.
            ValueError: `version` is not one this take may happen at, or a prompt is empty.
        """
        if not self._threads:
            raise RuntimeError("take was called before start: the queue has submitted nothing yet.")
        with self._changed:
            if self._taking_since is not None:
                raise RuntimeError("take is being waited in by another thread: only the main thread takes.")
            began = self._taking_since = time.monotonic()
        try:
            while (groups := self._take_or_wait(version, began)) is None:
                self._tell_waiting()
            return groups
        finally:
            with self._changed:
                self._take_seconds += time.monotonic() - began
                self._taking_since = None

    def sample(
        self, prompts: Sequence[Sequence[int]], num_rollouts: int, *, first_noise_key: int
    ) -> list[list[Rollout]]:
        """Rollouts of prompts beside the run's own, from the version published last: for evaluation. Main thread only.

        They share the engine with the groups in flight and are not counted among the outcomes; with a `lag` they have
        it to themselves, after everything submitted so far is sampled and scored. Prompt number i draws the noise of
        `first_noise_key + i`.

        Raises:
            StallError: `stall_timeout` seconds passed without an event.
            EngineError: the engine failed, or failed for one of these prompts `max_attempts` times.
            QueueClosed: the queue is closed.
        """
        if not self._threads:
            raise RuntimeError("sample was called before start.")
        side = SideRequests(prompts, num_rollouts, first_noise_key, self._core.max_attempts)
        self._settle(scored=True)
        with self._changed:
            self._shared.raise_if_over()
            self._shared.side, began = side, time.monotonic()
            self._shared.progress()
        try:
            while self._sampling(side, began):
                self._tell_waiting()
        finally:
            with self._changed:
                self._shared.side = None
        return side.rollouts()

    def close(self) -> None:
        """Stop the background work and book what is left as unused. Idempotent, bounded, from any state.

        The engine is left to its owner. A thread that is stuck in the engine or in a reward function is abandoned
        after `close_timeout` seconds, with a warning; whatever it still returns is ignored.
        """
        with self._changed:
            self._shared.closed = True
            self._changed.notify_all()
        if self._interrupt_score is not None:
            self._interrupt_score()
        with self._changed:
            overdue = self._core.scoring_seconds() >= (self._score_timeout or self._stall_timeout)
        patience = min(OVERDUE_CLOSE_SECONDS, self._close_timeout) if overdue else self._close_timeout
        deadline = time.monotonic() + patience
        for thread in self._threads:
            if thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning(
                    "The %s did not end within %s s and is abandoned: the engine's wait or a reward function does not "
                    "return.",
                    thread.name,
                    patience,
                )
        with self._changed:
            self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # --- any thread ---------------------------------------------------------------------------------------------

    def status(self) -> QueueStatus:
        """What is outstanding, and why either side waits. Cheap, never blocks for long."""
        with self._changed:
            taking = 0.0 if self._taking_since is None else time.monotonic() - self._taking_since
            status = queue_status(self._core, self._take_seconds + taking, self._shared.blocked_seconds)
            if (error := self._shared.error) is not None:
                return replace(status, producer=f"stopped by an error: {error}", consumer="stopped by an error")
            if self._shared.closed:
                return replace(status, producer="the queue is closed", consumer="the queue is closed")
            return status if self._threads else replace(status, producer="the queue is not started")

    def outcomes(self) -> Outcomes:
        """What became of every prompt and attempt so far."""
        with self._changed:
            return self._core.outcomes()

    # --- steps of the main thread -------------------------------------------------------------------------------

    def _published(self, version: int) -> None:
        with self._changed:
            self._core.published(version)
            self._shared.progress()
        self._fill_prompts()

    def _take_or_wait(self, version: int, began: float) -> list[Group] | None:
        """One look at the queue: a batch, or `None` after prompts were tokenised or something may have changed."""
        self._shared.raise_if_over()
        self._fill_prompts()
        with self._changed:
            self._shared.raise_if_over()
            if self._core.end is not None:
                raise EndOfData(self._core.end)
            groups = self._core.try_take(version)
            if groups is not None:
                self._shared.progress()
                return groups
            if (reason := starved(self._core)) is not None:
                raise StallError(reason)
            if self._core.admission() == "prompts":
                return None
            self._wait_for_progress(began)
            return None

    def _sampling(self, side: SideRequests, began: float) -> bool:
        """Whether `side` is not done yet, after waiting for something to change."""
        with self._changed:
            if side.done:
                return False
            self._shared.raise_if_over()
            self._wait_for_progress(began)
            return True

    def _settle(self, *, scored: bool = False) -> None:
        """With a `lag`, wait until all that is to be sampled from the published version has been, and `scored`."""
        began = time.monotonic()
        while self._core.plan.lag is not None:
            self._fill_prompts()
            with self._changed:
                self._shared.raise_if_over()
                if self._core.settled and not (scored and self._core.scoring):
                    return
                if self._core.admission() != "prompts":
                    self._wait_for_progress(began)
            self._tell_waiting()

    def _wait_for_progress(self, began: float) -> None:
        """Wait for the next event, or raise when there has been none for too long since `began`, or a score is
        overdue; the caller holds the lock."""
        quiet = time.monotonic() - max(began, self._shared.last_progress)
        if quiet >= self._stall_timeout:
            raise StallError(stall_report(self.status(), quiet, self._describe_score()))
        longest = self._stall_timeout - quiet
        if self._score_timeout is not None:
            scoring = self._core.scoring_seconds()
            if scoring >= self._score_timeout:
                raise StallError(overdue_report(self.status(), scoring, self._score_timeout, self._describe_score()))
            longest = min(longest, self._score_timeout - scoring)
        self._changed.wait(min(longest, WAITING_TOLD_SECONDS))

    def _tell_waiting(self) -> None:
        """Not under the lock: it may take as long as another process needs to answer."""
        if time.monotonic() - self._waiting_told >= WAITING_TOLD_SECONDS:
            self._while_waiting()
            self._waiting_told = time.monotonic()

    def _fill_prompts(self) -> None:
        with self._changed:
            wanted = self._core.prompts_wanted
        buffered, ended = self._prompts.buffered, self._prompts.source_ended
        if buffered < wanted and not ended:
            self._prompts.fill(wanted)
            with self._changed:
                self._shared.progress()


def _require_positive(**settings: float) -> None:
    for name, value in settings.items():
        if value <= 0:
            raise ValueError(f"{name} is {value}, but it must be positive.")
