"""The `GenerationQueue`: prompts go in, batches of scored groups come out, sampled ahead of training within a bound.

Guarantees:
- `max_staleness` bounds how many groups may be outstanding (see `take_plan.TakePlan`); `take` hands groups out in
  submission order (see `take_order`); the outcome of every prompt is recorded (see `outcomes`);
- only the main thread, whose side this file is, uses the dataset, the tokenizer and `publish`; only background threads
  make the engine's other calls and call the reward functions (see `threads`);
- no lock is held while the engine, the reward functions or the tokenizer work;
- every wait has a timeout, and whatever goes wrong in the background is raised by the next `take`, with its cause.

With `max_staleness=0`, which is the schedule "sync", no group is sampled before the weights that it is trained with
are published.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

from trl_a3po.errors import StallError
from trl_a3po.protocol.engine import Engine
from trl_a3po.protocol.images import PromptImages
from trl_a3po.protocol.records import Group, Rejection, Rollout, Score
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.rollout.engine_watch import EngineWatch
from trl_a3po.rollout.evaluation_requests import EvaluationRequests
from trl_a3po.rollout.outcomes import AttemptRecord, Outcomes
from trl_a3po.rollout.prompt_stream import PromptStream
from trl_a3po.rollout.queue_core import QueueCore
from trl_a3po.rollout.queue_state import QueueState
from trl_a3po.rollout.shared_state import SharedState
from trl_a3po.rollout.take_plan import TakePlan
from trl_a3po.rollout.threads import background_threads
from trl_a3po.rollout.wait_reasons import QueueStatus, overdue_report, queue_status, stall_report, starvation_reason
from trl_a3po.workers.running_clock import TICK, RunningClock

logger = logging.getLogger(__name__)

WHILE_WAITING_SECONDS = 1.0  # between two calls of `while_waiting`
OVERDUE_CLOSE_SECONDS = 0.5  # for reward functions that are known to hang


class EndOfData(Exception):
    """Raised by `take` when no batch is left: every take of the run has been handed out, or the prompts that are left
    do not fill another batch. It is not an error."""


class GenerationQueue:
    """Keeps an engine busy ahead of training.

    Args:
        engine: a started engine. The queue neither starts nor closes it.
        prompts: the prompt stream. Nothing else may read from it.
        score: group -> its score, or the scored group to train on instead, or a `Rejection`, which has another prompt
            take the group's place.
        groups_per_batch: B, the groups that one take hands out.
        num_rollouts: G, the rollouts of a group.
        max_staleness: largest staleness of a trained token, in optimizer steps. With 0, nothing is sampled ahead.
        version_of_take: take number n of this run (0-based) -> the policy version it happens at, nondecreasing. A
            take may happen at a lower version than this, never at a higher one.
        total_takes: takes of the run. Nothing is submitted for a later take.
        lag: for `schedule="fixed_lag"`: how many takes before its own take every batch is sampled, submitted as a
            whole to an engine without other work. `None` samples whatever `max_staleness` allows.
        max_attempts: attempts at a prompt before the run stops with `GenerationFailed`.
        stall_timeout: seconds without an event or a sampled token after which a waiting `take` raises `StallError`.
            Time in which this process or the engine's worker is stopped does not count.
        max_tokens: most tokens of a rollout. Tokens beyond what the groups in the engine can have are no progress;
            `None` sets no limit.
        max_in_flight: largest number of groups in the engine at a time. `None` sets no limit besides `max_staleness`.
        max_rejected_in_a_row: groups that may be rejected in a row before the run stops with `StallError`. `None`
            stands for as many as 10 batches hold.
        replaces_groups: groups are expected to be rejected, so that the rows of others are read in reserve.
        close_timeout: seconds for which `close` waits for the background threads before it abandons them.
        score_threads: number of threads that score, each one group at a time.
        score_timeout: seconds that scoring one group may take before a waiting `take` raises `StallError`.
        scoring_seconds: returns how much of the time that scoring the present group has taken counts towards
            `score_timeout`; by default all of it.
        interrupt_score: called by `close`; it makes the scoring under way end early, with any error.
        attempt_ended: called with the record of each attempt that ends, from any thread, under the queue's lock. It
            must not wait.
        describe_score: returns what the reward functions are doing and what would help if they hang, for the message
            of a `StallError`, or an empty text.
        while_waiting: called repeatedly on the main thread while it waits, about every second.
        new_tokens: the number of a prompt's tokens -> how many tokens a completion may have, `None` for as many as
            the engine's settings say.
        runs_episodes: the requests for `engine` hold their dataset rows.
        describe_engine: returns what the engine waits for, and what would help, for the message of a `StallError`, or
            an empty text. It must not wait.
        stopped_scoring: returns which process of the reward functions is stopped, or an empty text. Time does not
            count then.
        running: the clock of all limits, which `scoring_seconds` may share; by default a new one.
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
        max_tokens: int | None = None,
        max_in_flight: int | None = None,
        max_rejected_in_a_row: int | None = None,
        replaces_groups: bool = True,
        close_timeout: float = 5.0,
        score_threads: int = 1,
        score_timeout: float | None = None,
        scoring_seconds: Callable[[], float] | None = None,
        interrupt_score: Callable[[], None] | None = None,
        attempt_ended: Callable[[AttemptRecord], None] = lambda attempt: None,
        describe_score: Callable[[], str] = lambda: "",
        while_waiting: Callable[[], None] = lambda: None,
        new_tokens: Callable[[int], int | None] = lambda prompt_tokens: None,
        runs_episodes: bool = False,
        describe_engine: Callable[[], str] = lambda: "",
        stopped_scoring: Callable[[], str] = lambda: "",
        scoring_starts: Callable[[], bool] = lambda: False,
        running: Callable[[], float] | None = None,
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
        self._running = RunningClock() if running is None else running
        self._engine_watch = EngineWatch()
        self._max_tokens = max_tokens
        self._close_timeout = close_timeout
        self._score_timeout = score_timeout
        self._scoring_seconds = scoring_seconds
        self._interrupt_score = interrupt_score
        self._describe_score = describe_score
        self._describe_engine = describe_engine
        self._stopped_scoring = stopped_scoring
        self._scoring_starts = scoring_starts
        self._stopped = ""
        self._while_waiting = while_waiting
        self._while_waiting_called = time.monotonic()
        core = QueueCore(
            prompts=prompts,
            plan=TakePlan(groups_per_batch, max_staleness, version_of_take, total_takes, lag),
            num_rollouts=num_rollouts,
            max_attempts=max_attempts,
            max_in_flight=max_in_flight,
            max_rejected_in_a_row=10 * groups_per_batch if max_rejected_in_a_row is None else max_rejected_in_a_row,
            replaces_groups=replaces_groups,
            attempt_ended=attempt_ended,
            runs_episodes=runs_episodes,
            running=self._running,
            new_tokens=new_tokens,
        )
        self._core, self._shared = core, SharedState(core, self._running)
        self._changed = self._shared.changed  # guards the core and everything below
        self._background = background_threads(
            self._shared, engine, score, score_threads, close_interrupts_scoring=interrupt_score is not None
        )
        self._threads: list[threading.Thread] = []
        self._taking_since: float | None = None
        self._take_seconds = 0.0

    # --- the main thread ----------------------------------------------------------------------------------------

    def start(self, version: int) -> None:
        """Begin to submit to the engine, which samples from `version`. Main thread only."""
        if self._threads:
            raise RuntimeError("The queue was started already.")
        self._shared.raise_if_over()
        self._published(version)
        self._threads = self._background
        for thread in self._threads:
            thread.start()

    def restore(self, state: QueueState, version: int) -> None:
        """Continue where another process saved `state`, with an engine that samples from `version`. Main thread only,
        before `start(version)`. The prompt stream must begin at `state.first_row`.

        Raises:
            ValueError: the prompts are not those of that process, or `max_staleness` is too small for its groups.
        """
        if self._threads:
            raise RuntimeError("restore was called after start.")
        prompts = self._prompts.fast_forward(
            state.cursor, {item.prompt_index: item.prompt_ids for item in state.outstanding}
        )
        self._prompts.left_out = Counter(state.left_out)
        with self._changed:
            self._core.restore(state, prompts, version)

    def state(self) -> QueueState:
        """A snapshot that `restore` accepts. The queue continues to work. With a `lag`, this first waits for the batch
        in the engine and its rewards, so that no group is cut off.

        Raises:
            EngineError, RewardError, GenerationFailed, StampError: the error that stopped the background work.
            QueueClosed: the queue is closed.
        """
        self._wait_until_settled(scored=True)
        with self._changed:
            self._shared.raise_if_over()
            return self._core.state()

    def publish(self, update: WeightUpdate) -> None:
        """Publish `update` to the engine and admit the prompts that this allows. Main thread only.

        With a `lag`, this first waits for the groups that belong to the version published before.

        Raises:
            EngineError: the engine could not load the weights.
            StallError: `stall_timeout` seconds of that wait passed without an event.
        """
        self._shared.raise_if_over()
        self._wait_until_settled()
        self._engine.publish(update)
        self._published(update.version)

    def published(self, version: int) -> None:
        """Admit the prompts that a publish allows which the caller has made itself. Main thread only."""
        self._shared.raise_if_over()
        self._published(version)

    def sample_again(self, since: float) -> None:
        """Have everything sampled again that was in the engine at the time `since` (`time.monotonic`) or later,
        because an evaluation had it sample from other weights than those that are trained. Main thread only."""
        with self._changed:
            self._shared.raise_if_over()
            given_up = self._core.sample_again(since, "sampled from weights of an evaluation")
            self._shared.to_cancel.extend(given_up)
            self._shared.progress()

    def take(self, version: int) -> list[Group]:
        """The next B groups, in submission order, to be trained at policy version `version`. Main thread only.

        Waits until the groups are ready, and meanwhile tokenises the prompts that submission needs.

        Raises:
            EndOfData: there is no further batch.
            StallError: `stall_timeout` seconds passed without an event, scoring a group took longer than
                `score_timeout`, or the settings can never fill this take.
            EngineError, RewardError, GenerationFailed, StampError: the error that stopped the background work, with
                its cause.
            QueueClosed: the queue is closed.
            ValueError: this take may not happen at `version`, or a prompt is empty.
        """
        if not self._threads:
            raise RuntimeError("take was called before start: the queue has submitted nothing yet.")
        with self._changed:
            if self._taking_since is not None:
                raise RuntimeError("take was called while another thread waits in it: only the main thread takes.")
            since = self._taking_since = time.monotonic()
            began = self._running()
        try:
            while (groups := self._take_or_wait(version, began)) is None:
                self._look_around()
            return groups
        finally:
            with self._changed:
                self._take_seconds += time.monotonic() - since
                self._taking_since = None

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_rollouts: int,
        *,
        first_noise_key: int,
        rows: Sequence[dict[str, Any]] | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[list[Rollout]]:
        """Rollouts of an evaluation's prompts, from the version published last. Main thread only.

        These rollouts share the engine with the groups in flight and are not counted among the outcomes. With a `lag`,
        they have the engine to themselves, after everything submitted so far has been sampled and scored. Prompt
        number i is sampled with the noise of `first_noise_key + i`. Where requests are episodes, `rows` holds the
        dataset row of each prompt; `images` holds the images of each.

        Raises:
            StallError: `stall_timeout` seconds passed without an event.
            EngineError: the engine failed, or one of these prompts failed `max_attempts` times.
            QueueClosed: the queue is closed.
        """
        if not self._threads:
            raise RuntimeError("sample was called before start.")
        core = self._core
        evaluation = EvaluationRequests(
            prompts, num_rollouts, first_noise_key, core.max_attempts, rows, core.new_tokens, images
        )
        self._wait_until_settled(scored=True)
        with self._changed:
            self._shared.raise_if_over()
            self._shared.evaluation, began = evaluation, self._running()
            self._shared.progress()
        try:
            while self._wait_for_evaluation(evaluation, began):
                self._look_around()
        finally:
            with self._changed:
                self._shared.evaluation = None
        return evaluation.rollouts()

    def close(self) -> None:
        """Stop the background work and record the remaining prompts as unused. Idempotent; takes bounded time in any
        state.

        The engine is not closed. A thread that is stuck in the engine or in a reward function is abandoned after
        `close_timeout` seconds, with a warning, and whatever it returns later is ignored.
        """
        with self._changed:
            self._shared.closed = True
            self._changed.notify_all()
        if self._interrupt_score is not None:
            self._interrupt_score()
        with self._changed:
            overdue = self._core.scoring_seconds() >= (self._score_timeout or self._stall_timeout)
        timeout = min(OVERDUE_CLOSE_SECONDS, self._close_timeout) if overdue else self._close_timeout
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning(
                    "The %s did not end within %s s and is abandoned: the engine's wait or a reward function does not "
                    "return.",
                    thread.name,
                    timeout,
                )
        with self._changed:
            self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- any thread ---------------------------------------------------------------------------------------------

    def status(self) -> QueueStatus:
        """What is outstanding, and why submission and the next take wait. Cheap; never blocks for long."""
        with self._changed:
            taking = 0.0 if self._taking_since is None else time.monotonic() - self._taking_since
            status = queue_status(self._core, self._take_seconds + taking, self._shared.staleness_blocked_seconds)
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
        """The batch if it is ready. Otherwise `None`, after prompts were tokenised or something may have changed."""
        self._shared.raise_if_over()
        self._fill_prompts()
        with self._changed:
            self._shared.raise_if_over()
            if self._core.end_reason is not None:
                raise EndOfData(self._core.end_reason)
            groups = self._core.try_take(version)
            if groups is not None:
                self._shared.progress()
                return groups
            if (reason := starvation_reason(self._core)) is not None:
                raise StallError(reason)
            if self._core.admission() == "prompts":
                return None
            self._wait_for_progress(began)
            return None

    def _wait_for_evaluation(self, evaluation: EvaluationRequests, began: float) -> bool:
        """`False` if the evaluation's prompts are done. Otherwise `True`, after something may have changed."""
        with self._changed:
            if evaluation.done:
                return False
            self._shared.raise_if_over()
            self._wait_for_progress(began)
            return True

    def _wait_until_settled(self, *, scored: bool = False) -> None:
        """With a `lag`, wait until everything that is to be sampled from the published version has been sampled, and,
        if `scored`, until it has been scored too."""
        began = self._running()
        while self._core.plan.lag is not None:
            self._fill_prompts()
            with self._changed:
                self._shared.raise_if_over()
                if self._core.settled and not (scored and self._core.scoring):
                    return
                if self._core.admission() != "prompts":
                    self._wait_for_progress(began)
            self._look_around()

    def _wait_for_progress(self, began: float) -> None:
        """Wait for the next event. Raise `StallError` if there has been no event for `stall_timeout` seconds since
        `began`, or if scoring a group takes longer than `score_timeout`. The caller holds the lock."""
        quiet = self._running() - max(began, self._shared.last_progress)
        if quiet >= self._stall_timeout:
            doing = self._describe_score() or self._describe_engine()
            raise StallError(stall_report(self.status(), quiet, str(self._engine_watch), doing))
        longest = self._stall_timeout - quiet
        if self._score_timeout is not None:
            scoring = (self._scoring_seconds or self._core.scoring_seconds)()
            if scoring >= self._score_timeout:
                raise StallError(overdue_report(self.status(), scoring, self._score_timeout, self._describe_score()))
            longest = min(longest, self._score_timeout - scoring)
        self._changed.wait(min(longest, TICK))

    def _look_around(self) -> None:
        """Look whether the engine gets on, and call `while_waiting` if the last call was long enough ago. Not under
        the lock: the call may take as long as another process needs to answer."""
        stats = self._engine.stats()
        stopped = stats.trouble if stats.is_stopped else self._stopped_scoring()
        starts = self._scoring_starts()
        with self._changed:
            gets_on = self._engine_watch.gets_on(stats, self._shared.events, self._most_tokens())
            if gets_on or stopped or starts:
                self._shared.last_progress = self._running()
        if stopped and not self._stopped:
            logger.warning("Training waits: %s.", stopped)
        self._stopped = stopped
        if time.monotonic() - self._while_waiting_called >= WHILE_WAITING_SECONDS:
            self._while_waiting()
            self._while_waiting_called = time.monotonic()

    def _most_tokens(self) -> int | None:
        """Most tokens that what is in the engine can have; the caller holds the lock."""
        if self._max_tokens is None:
            return None
        evaluation = self._shared.evaluation
        rollouts = self._core.count("in the engine") * self._core.num_rollouts
        return self._max_tokens * (rollouts + (evaluation.rollouts_in_engine if evaluation else 0))

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
