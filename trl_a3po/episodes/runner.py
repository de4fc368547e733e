"""`EpisodeRunner`: plays episodes between the queue and an engine. The queue sees an engine that returns groups.

Guarantees:
- every group that is submitted ends in one event: `GroupFinished` with a rollout of every episode, or `GroupFailed` if
  one of them failed; a failed group has no rollouts, and no reward is made up for it;
- an episode fails if its rollout function raises, if it takes longer than `episode_timeout`, or if the engine cannot
  sample a turn; the other episodes of the group are then cancelled;
- only the thread that calls `submit`, `wait` and `cancel` calls those of the engine; rollout functions run in one
  thread of their own, with one event loop;
- later turns reach the engine before groups that have not begun, in the order in which they were asked for; the
  engine is told when an episode is over, whatever ended it;
- the noise of a token is that of its group, its rollout's number and its position in the completion, tokens of tools
  counted, so a group that is tried again draws the same noise;
- `close` takes bounded time, also if a rollout function does not let itself be cancelled.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_a3po.episodes.endpoint import Endpoints
from trl_a3po.episodes.episode import Episode, EpisodeResult, RolloutFunction
from trl_a3po.episodes.templates import ChatTemplates
from trl_a3po.episodes.turn_requests import TurnRequests
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import (
    Engine,
    EngineEvent,
    EngineStats,
    GroupEnd,
    GroupFailed,
    GroupFinished,
    GroupProgress,
    GroupRequest,
    SamplingSettings,
)
from trl_a3po.protocol.records import Rollout
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate

logger = logging.getLogger(__name__)

ENGINE_POLL_SECONDS = 0.005  # how late a turn reaches an engine that is at work
ANSWER_SECONDS = 1.0  # in which an event loop that is not blocked answers
NOT_USERS = {"asyncio", "selectors", "threading", "trl_a3po"}
CANCEL_TIMEOUT = 2.0  # seconds for episodes to end when they are cancelled
CLOSE_TIMEOUT = 10.0  # seconds for everything that belongs to the event loop


async def _nothing() -> None:
    """There is nothing to close."""


@dataclass(slots=True, eq=False)
class PlayedGroup:
    """A group that is being played."""

    request: GroupRequest
    episodes: list[Episode] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None


class EpisodeRunner:
    """
    Args:
        engine: a started engine.
        play: plays one episode.
        reward_name: the column of a reward that is a number.
        templates: renders prompts and turns. Only the runner's thread uses it.
        max_completion_length: most tokens of a completion, those of tools included.
        sampling: how the engine samples, for the endpoints of episodes.
        context: most tokens of prompt and completion; `None` for no limit.
        episode_timeout: seconds that one episode may take; `None` for no limit.
        dropped: called, in the runner's thread, with the keys of the episodes of a group that failed or was cancelled.
        closing: awaited, in the runner's thread, when everything has ended.
    """

    def __init__(
        self,
        engine: Engine,
        play: RolloutFunction,
        *,
        reward_name: str,
        templates: ChatTemplates,
        max_completion_length: int,
        sampling: SamplingSettings,
        context: int | None = None,
        episode_timeout: float | None = None,
        dropped: Callable[[Sequence[int]], None] = lambda keys: None,
        closing: Callable[[], Awaitable[None]] = _nothing,
    ):
        self._engine = engine
        self._play = play
        self._reward_name = reward_name
        self._templates = templates
        self._longest = max_completion_length
        self._context = context
        self._timeout = episode_timeout
        self._dropped = dropped
        self._closing = closing
        self._endpoints = Endpoints(sampling)
        self._turns = TurnRequests(self._submit_turns, self._cancel_turn)
        self._groups: dict[int, PlayedGroup] = {}  # of the runner's thread
        self._keys = itertools.count()
        self._changed = threading.Condition()  # guards all that follows
        self._outbox: deque[GroupRequest] = deque()
        self._cancelled: list[int] = []
        self._over: list[int] = []  # keys of episodes
        self._events: list[EngineEvent] = []
        self._in_engine: set[int] = set()
        self._playing: tuple[PlayedGroup, ...] = ()
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="a3po episodes", daemon=True)
        self._thread.start()

    # --- as an engine, for the queue -----------------------------------------------------------------------------

    def start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        self._engine.start(spec, sampling, update)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            self.call(self._begin, request)

    def wait(self, timeout: float) -> list[EngineEvent]:
        deadline = time.monotonic() + timeout
        while True:
            self._hand_over()
            left = max(0.0, deadline - time.monotonic())
            working = bool(self._in_engine)
            self._receive(self._engine.wait(min(left, ENGINE_POLL_SECONDS) if working else 0.0))
            with self._changed:
                if self._error is not None:
                    raise EngineError(f"The thread that plays episodes stopped: {self._error!r}.") from self._error
                if not (self._events or self._outbox or working):
                    self._changed.wait(left)
                if self._events or time.monotonic() >= deadline:
                    events, self._events = self._events, []
                    return events

    def cancel(self, request_ids: Sequence[int]) -> None:
        cancelled = set(request_ids)
        with self._changed:
            self._events = [event for event in self._events if event.request_id not in cancelled]
        self.call(self._cancel_groups, cancelled)
        self._hand_over()

    def end_episodes(self, episodes: Sequence[int]) -> None:
        """Nothing to do: whoever submits groups does not know their episodes."""

    def publish(self, update: WeightUpdate) -> None:
        self._engine.publish(update)

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        return self._engine.score(prompt_ids, completion_ids, timeout)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        """Cancel every episode and end the thread. The engine is not closed."""
        self.call(lambda: self._loop.create_task(self._end()))
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            logger.warning(
                "The thread that plays episodes did not end within %s s and is abandoned: %s",
                *(CLOSE_TIMEOUT, self.describe() or "it blocks its event loop."),
            )

    # --- for reports, from any thread ----------------------------------------------------------------------------

    def describe(self) -> str:
        """What the episode that has waited longest waits for, and what would help if it hangs; empty if none plays."""
        episodes = [(episode, group) for group in self._playing for episode in list(group.episodes)]
        playing = [one for one in episodes if not one[0].over]
        if not playing:
            return ""
        if blocked := self._blocked_by():
            return blocked
        outside = [one for one in playing if one[0].doing != "sampling"] or playing
        episode, group = min(outside, key=lambda one: one[0].doing_since)
        seconds = time.monotonic() - episode.doing_since
        return (
            f"{len(playing)} episodes are being played. Longest without a change: prompt {group.request.noise_key}, "
            f"rollout {episode.number}, turn {episode.turns + 1}, {episode.doing} for {seconds:.1f} s. Set "
            "tool_timeout and episode_timeout, at which a tool fails and an episode is tried again, or, if it needs "
            "that long, raise stall_timeout."
        )

    def _blocked_by(self) -> str:
        """What keeps the event loop from going on, if it does not answer."""
        answered = threading.Event()
        self.call(answered.set)
        frame = None if answered.wait(ANSWER_SECONDS) else sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return ""
        # From what runs now outwards, so that the last one is the rollout function.
        lines = [(each.f_globals.get("__name__", ""), line, each.f_code) for each, line in traceback.walk_stack(frame)]
        users = [line for line in lines if line[0].partition(".")[0] not in NOT_USERS]
        if not users:  # it goes on, only slowly
            return ""
        _, number, code = users[-1]
        return (
            f"All episodes wait for {code.co_name}, which blocks the thread that plays them, at {code.co_filename}, "
            f"line {number}. No timeout can end that: have it `await`, call what blocks with `await "
            "asyncio.to_thread(...)`, or make it a synchronous tool, which runs in a thread of its own."
        )

    # --- the thread of the queue ---------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Submit to the engine, and cancel in it, what the runner's thread has left to do."""
        with self._changed:
            requests, cancelled, over = list(self._outbox), self._cancelled, self._over
            self._outbox.clear()
            self._cancelled, self._over = [], []
            self._in_engine.update(request.request_id for request in requests)
            self._in_engine.difference_update(cancelled)
        if requests:
            self._engine.submit(sorted(requests, key=lambda request: request.first_position == 0))  # later turns first
        if cancelled:
            self._engine.cancel(cancelled)
        if over:
            self._engine.end_episodes(over)

    def _receive(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, GroupProgress):
                continue
            with self._changed:
                self._in_engine.discard(event.request_id)
            self.call(self._turns.ended, event)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the runner's thread call `function`, unless it has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- the runner's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._failed)
        try:
            self._loop.run_forever()
        except BaseException as error:
            self._stop(error)
        finally:
            self._loop.close()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something that a rollout function started, and does not wait for, has failed; or this library has."""
        logger.warning("In the thread that plays episodes: %s", context["message"], exc_info=context.get("exception"))

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _submit_turns(self, requests: list[GroupRequest]) -> None:
        with self._changed:
            self._outbox.extend(requests)
            self._changed.notify_all()

    def _cancel_turn(self, request_id: int) -> None:
        with self._changed:
            waiting = [request for request in self._outbox if request.request_id != request_id]
            if len(waiting) == len(self._outbox):
                self._cancelled.append(request_id)
            self._outbox = deque(waiting)
            self._changed.notify_all()

    def _report(self, event: EngineEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _begin(self, request: GroupRequest) -> None:
        group = self._groups[request.request_id] = PlayedGroup(request)
        group.task = self._loop.create_task(self._play_group(group))
        group.task.add_done_callback(self._group_ended)
        self._playing = tuple(self._groups.values())

    def _group_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)

    def _cancel_groups(self, request_ids: set[int]) -> None:
        for request_id in request_ids & self._groups.keys():
            task = self._groups[request_id].task
            if task is not None:
                task.cancel()

    async def _play_group(self, group: PlayedGroup) -> None:
        request = group.request
        group.episodes = [self._episode(request, number) for number in range(request.num_rollouts)]
        tasks = [self._loop.create_task(self._play_episode(episode)) for episode in group.episodes]
        end: GroupEnd
        try:
            end = GroupFinished(request.request_id, list(await asyncio.gather(*tasks)))
            self._forget(group)
        except asyncio.CancelledError:
            await self._drop(group, tasks)
            raise
        except EpisodeFailed as failure:
            await self._drop(group, tasks)
            end = GroupFailed(request.request_id, str(failure))
        self._report(end)

    async def _drop(self, group: PlayedGroup, tasks: list["asyncio.Task[Rollout]"]) -> None:
        """End what is left of a group that has no rollouts."""
        self._forget(group)
        for task in tasks:
            task.cancel()
        ended, _ = await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT)
        for task in ended:
            task.cancelled() or task.exception()  # which is noted as read
        self._dropped([episode.key for episode in group.episodes])

    def _forget(self, group: PlayedGroup) -> None:
        del self._groups[group.request.request_id]
        self._playing = tuple(self._groups.values())

    def _episode(self, request: GroupRequest, number: int) -> Episode:
        return Episode(
            request,
            number,
            key=next(self._keys),
            templates=self._templates,
            max_completion_length=self._longest,
            context=self._context,
            sampler=self._sample,
            open_endpoint=self._endpoints.open,
        )

    async def _sample(self, episode: Episode, request: GroupRequest) -> Rollout:
        rollout = await self._turns.ask(request)
        self._report(GroupProgress(episode.group))
        return rollout

    async def _play_episode(self, episode: Episode) -> Rollout:
        """Play an episode.

        Raises:
            EpisodeFailed: it has no rollout; the message says why.
        """
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                answer = await self._play(episode)
            episode.over = True
            result = answer if isinstance(answer, EpisodeResult) else EpisodeResult(answer)
            return episode.rollout(result, self._rewards(result))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except TimeoutError as error:
            late = f"it took longer than episode_timeout={self._timeout} s, and waited last for {episode.waited_for}"
            raise EpisodeFailed(episode, late if limit.expired() else f"it raised {error!r}") from error
        except EngineError as error:
            raise EpisodeFailed(episode, str(error)) from error
        except BaseException as error:  # also an exit: it ends the episode, not the thread
            logger.debug("Rollout %d has failed.", episode.number, exc_info=error)
            raise EpisodeFailed(episode, f"it raised {error!r}") from error
        finally:
            with self._changed:
                self._over.append(episode.key)

    def _rewards(self, result: EpisodeResult) -> Mapping[str, float | None]:
        if isinstance(result.reward, Mapping):
            return {name: _finite(reward) for name, reward in result.reward.items()}
        return {self._reward_name: _finite(result.reward)}

    async def _end(self) -> None:
        for group in list(self._groups.values()):
            if group.task is not None:
                group.task.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=2 * CANCEL_TIMEOUT)
        try:
            await self._endpoints.close()
            await self._closing()
        finally:
            self._loop.stop()


def _finite(reward: float | None) -> float | None:
    number = None if reward is None else float(reward)
    if number is not None and not math.isfinite(number):
        raise ValueError(f"the reward is {number}: return a finite number, or None for no reward")
    return number


class EpisodeFailed(Exception):
    """An episode has no rollout."""

    def __init__(self, episode: Episode, why: str):
        super().__init__(f"rollout {episode.number}, turn {episode.turns + 1}: {why}")
