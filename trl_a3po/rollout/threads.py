"""The background threads of a `GenerationQueue`: one works with the engine, the others score.

Guarantees: the engine's `submit`, `wait` and `cancel` are called by the rollout thread only, the reward functions by
the reward threads only, one group at a time each, and never under the lock; whatever ends a thread early stops the
queue.
"""

import threading
from collections.abc import Callable

from trl_a3po.errors import RewardError
from trl_a3po.protocol.engine import Engine, GroupRequest
from trl_a3po.protocol.records import Group, Rejection, Score
from trl_a3po.rollout.shared_state import Shared

ENGINE_POLL_SECONDS = 0.02  # how late a publish opens submission while the engine has work
IDLE_POLL_SECONDS = 0.5  # how late a dead engine is noticed while it has none


def background_threads(
    shared: Shared, engine: Engine, score: Callable[[Group], Score | Group | Rejection], scorers: int, *, cut_off: bool
) -> list[threading.Thread]:
    """The threads, not started.

    Args:
        score: as `GenerationQueue` takes it.
        scorers: threads that score.
        cut_off: closing the queue ends scores under way, with whatever error.
    """
    loops = [("a3po rollout thread", lambda: _rollout_loop(shared, engine))]
    loops += [("a3po reward thread", lambda: _reward_loop(shared, score, cut_off))] * scorers
    return [threading.Thread(target=_guarded, args=(shared, loop), name=name, daemon=True) for name, loop in loops]


def _guarded(shared: Shared, loop: Callable[[], None]) -> None:
    try:
        loop()
    except BaseException as error:  # it would otherwise end in silence
        shared.fail(error)


def _rollout_loop(shared: Shared, engine: Engine) -> None:
    """Submits what admission allows and brings finished groups home."""
    core, changed = shared.core, shared.changed
    while True:
        with changed:
            if shared.over:
                break
            requests = _submissions(shared)
            shared.blocked(core.admission() == "max_staleness")
            if requests:
                shared.progress()
            busy = core.count("in the engine") > 0 or shared.side is not None
            if not busy:
                changed.wait(IDLE_POLL_SECONDS)
        if requests:
            engine.submit(requests)
        events = engine.wait(ENGINE_POLL_SECONDS if busy else 0.0)
        with changed:
            for event in () if shared.over else events:
                shared.progress()
                if event.request_id >= 0:
                    core.engine_event(event)
                elif shared.side is not None:
                    shared.side.engine_event(event)
    with changed:
        shared.blocked(False)
        left = core.close()
    if left:
        engine.cancel(left)


def _submissions(shared: Shared) -> list[GroupRequest]:
    """What to hand to the engine now: the run's own prompts first."""
    beside = [] if shared.side is None else shared.side.submissions()
    return shared.core.submissions() + beside


def _reward_loop(shared: Shared, score: Callable[[Group], Score | Group | Rejection], cut_off: bool) -> None:
    """Scores finished groups, the oldest first."""
    while True:
        with shared.changed:
            while not shared.over and (due := shared.core.next_to_score()) is None:
                shared.changed.wait()
            if shared.over:
                return
        request_id, group = due
        try:
            result = score(group)
        except BaseException as error:  # an exit in it is one function's, not the process's
            with shared.changed:
                if shared.closed and cut_off:  # this is what did it
                    return
            if isinstance(error, RewardError):
                raise
            raise RewardError(
                f"Scoring the rollouts of prompt {group.prompt.index} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(result, (Score, Group, Rejection)):
            raise RewardError(
                f"Scoring the rollouts of prompt {group.prompt.index} returned a {type(result).__name__}: it must "
                "return a Score, a Group or a Rejection."
            )
        with shared.changed:
            if not shared.over:
                shared.progress()
                shared.core.scored(request_id, result)
