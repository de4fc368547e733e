"""The background threads of a `GenerationQueue`: one works with the engine, the others score.

Guarantees: only the rollout thread calls the engine's `submit`, `wait` and `cancel`; only the reward threads call the
reward functions, each for one group at a time; neither happens under the lock; whatever ends a thread early stops the
queue.
"""

import threading
from collections.abc import Callable, Sequence

from trl_a3po.errors import RewardError
from trl_a3po.protocol.engine import Engine, EngineEvent, GroupProgress, GroupRequest
from trl_a3po.protocol.records import Group, Rejection, Score
from trl_a3po.rollout.shared_state import SharedState

ENGINE_POLL_SECONDS = 0.02  # how late a publish opens submission while the engine has work
IDLE_POLL_SECONDS = 0.5  # how late the death of an idle engine is noticed

ScoreFunction = Callable[[Group], Score | Group | Rejection]


def background_threads(
    shared: SharedState, engine: Engine, score: ScoreFunction, score_threads: int, *, close_interrupts_scoring: bool
) -> list[threading.Thread]:
    """The threads, not yet started.

    Args:
        shared: what the threads share with the main thread.
        engine: the engine to submit to.
        score: as in `GenerationQueue`.
        score_threads: number of threads that score.
        close_interrupts_scoring: closing the queue ends the scoring under way, which then raises any error.
    """
    loops = [("a3po rollout thread", lambda: _rollout_loop(shared, engine))]
    loops += [("a3po reward thread", lambda: _reward_loop(shared, score, close_interrupts_scoring))] * score_threads
    return [threading.Thread(target=_guarded, args=(shared, loop), name=name, daemon=True) for name, loop in loops]


def _guarded(shared: SharedState, loop: Callable[[], None]) -> None:
    try:
        loop()
    except BaseException as error:  # otherwise the thread would end silently
        shared.fail(error)


# --- the rollout thread -------------------------------------------------------------------------------------------


def _rollout_loop(shared: SharedState, engine: Engine) -> None:
    """Submit what admission allows, and pass on what the engine finishes, until the queue is over."""
    while (work := _next_submissions(shared)) is not None:
        cancelled, requests, busy = work
        if cancelled:
            engine.cancel(cancelled)
        if requests:
            engine.submit(requests)
        _handle_events(shared, engine.wait(ENGINE_POLL_SECONDS if busy else 0.0))
    with shared.changed:
        shared.set_blocked_by_staleness(False)
        in_engine = shared.core.close()
    if in_engine:
        engine.cancel(in_engine)


def _next_submissions(shared: SharedState) -> tuple[list[int], list[GroupRequest], bool] | None:
    """What to cancel in the engine and what to submit to it now, the run's own prompts first, and whether that leaves
    the engine with work; `None` when the queue is over. Waits a moment if the engine has no work."""
    with shared.changed:
        shared.running()  # looked at often, so that only a stop of the process lets it stand still
        if shared.over:
            return None
        evaluation = [] if shared.evaluation is None else shared.evaluation.submissions()
        cancelled, shared.to_cancel = shared.to_cancel, []
        requests = shared.core.submissions() + evaluation
        shared.set_blocked_by_staleness(shared.core.admission() == "max_staleness")
        if requests:
            shared.progress()
        busy = shared.core.count("in the engine") > 0 or shared.evaluation is not None
        if not busy:
            shared.changed.wait(IDLE_POLL_SECONDS)
        return cancelled, requests, busy


def _handle_events(shared: SharedState, events: Sequence[EngineEvent]) -> None:
    with shared.changed:
        for event in () if shared.over else events:
            shared.progress()
            if isinstance(event, GroupProgress):
                continue
            if event.request_id >= 0:
                shared.core.engine_event(event)
            elif shared.evaluation is not None:
                shared.evaluation.engine_event(event)


# --- the reward threads -------------------------------------------------------------------------------------------


def _reward_loop(shared: SharedState, score: ScoreFunction, close_interrupts_scoring: bool) -> None:
    """Score finished groups, the oldest first, until the queue is over."""
    while (due := _next_to_score(shared)) is not None:
        request_id, group = due
        try:
            result = _score_group(score, group)
        except RewardError:
            with shared.changed:
                if shared.closed and close_interrupts_scoring:  # closing the queue is what raised it
                    return
            raise
        with shared.changed:
            if not shared.over:
                shared.progress()
                shared.core.record_score(request_id, result)


def _next_to_score(shared: SharedState) -> tuple[int, Group] | None:
    """The request id and the group to score next, once there is one; `None` when the queue is over."""
    with shared.changed:
        while not shared.over:
            if (due := shared.core.next_to_score()) is not None:
                return due
            shared.changed.wait()
    return None


def _score_group(score: ScoreFunction, group: Group) -> Score | Group | Rejection:
    """What `score` returns for a group.

    Raises:
        RewardError: it raised, or returned something else than a `Score`, a `Group` or a `Rejection`.
    """
    try:
        result = score(group)
    except RewardError:
        raise
    except BaseException as error:  # also an exit: it ends the reward function, not the process
        raise RewardError(
            f"Scoring the rollouts of prompt {group.prompt.index} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(result, (Score, Group, Rejection)):
        raise RewardError(
            f"Scoring the rollouts of prompt {group.prompt.index} returned a {type(result).__name__}: it must "
            "return a Score, a Group or a Rejection."
        )
    return result
