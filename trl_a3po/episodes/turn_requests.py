"""Turns that episodes ask for, as requests for an engine.

Guarantees: every turn that is asked for gets its rollout, or an `EngineError` with the engine's reason; turns that
rollouts of one group ask for at the same time, with the same tokens before them, are one request, so that their prompt
is prefilled once; a request whose turns nobody waits for any more is cancelled; request ids are never used twice.

It belongs to one event loop.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFailed, GroupFinished, GroupRequest
from trl_a3po.protocol.records import Rollout


@dataclass(slots=True, eq=False)
class AskedTurn:
    """A turn of one rollout, and the future that gets it."""

    request: GroupRequest
    future: "asyncio.Future[Rollout]"


class TurnRequests:
    """
    Args:
        submit: called with the requests to submit to the engine.
        cancel: called with the id of a request that nobody waits for any more.
    """

    def __init__(self, submit: Callable[[list[GroupRequest]], None], cancel: Callable[[int], None]):
        self._submit = submit
        self._cancel = cancel
        self._ids = itertools.count()
        self._asked: list[AskedTurn] = []
        self._in_engine: dict[int, list[AskedTurn]] = {}

    async def ask(self, request: GroupRequest) -> Rollout:
        """Sample one rollout of `request`, whose `request_id` names its group.

        Raises:
            EngineError: the engine could not sample it.
        """
        loop = asyncio.get_running_loop()
        turn = AskedTurn(request, loop.create_future())
        if not self._asked:
            loop.call_soon(self._flush)
        self._asked.append(turn)
        return await turn.future

    def ended(self, event: GroupFinished | GroupFailed) -> None:
        """A request has ended in the engine."""
        turns = self._in_engine.pop(event.request_id, [])
        for place, turn in enumerate(turns):
            if turn.future.done():
                continue
            if isinstance(event, GroupFailed):
                turn.future.set_exception(EngineError(event.reason))
            elif len(event.rollouts) != len(turns):
                turn.future.set_exception(
                    EngineError(f"The engine returned {len(event.rollouts)} rollouts instead of {len(turns)}.")
                )
            else:
                turn.future.set_result(event.rollouts[place])

    def _flush(self) -> None:
        asked, self._asked = [turn for turn in self._asked if not turn.future.done()], []
        requests = []
        for turns in _together(asked):
            first = replace(turns[0].request, request_id=next(self._ids), num_rollouts=len(turns))
            self._in_engine[first.request_id] = turns
            for turn in turns:
                turn.future.add_done_callback(partial(self._left, first.request_id))
            requests.append(first)
        if requests:
            self._submit(requests)

    def _left(self, request_id: int, future: "asyncio.Future[Rollout]") -> None:
        turns = self._in_engine.get(request_id, [])
        if turns and all(turn.future.cancelled() for turn in turns):
            del self._in_engine[request_id]
            self._cancel(request_id)


def _together(asked: list[AskedTurn]) -> list[list[AskedTurn]]:
    """The turns that one request can ask for, in the order of their rollouts: of one group, with the same tokens
    before them and numbers that follow one another."""
    by_text: dict[Any, list[AskedTurn]] = {}
    for turn in asked:
        alike = replace(turn.request, first_rollout=0, first_episode=None)
        # Images are no part of the equality of requests: others of the same size have the same tokens.
        by_text.setdefault((alike, id(alike.images)), []).append(turn)
    requests: list[list[AskedTurn]] = []
    for turns in by_text.values():
        turns.sort(key=lambda turn: turn.request.first_rollout)
        for place, turn in enumerate(turns):
            number = turn.request.first_rollout
            if place and number == turns[place - 1].request.first_rollout + 1:
                requests[-1].append(turn)
            else:
                requests.append([turn])
    return requests
