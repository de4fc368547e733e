"""Several engines as one: each request goes to the one with the least to do, each publish to all of them.

Guarantees: those of `protocol/engine.py`, as each of the engines gives them; a token's version is that of the engine
that sampled it; a request submitted after `publish` returned is sampled from the published version or a newer one,
because all engines have it by then; an engine beyond recovery ends the run, as a single one would.
"""

import itertools
from collections.abc import Sequence

from trl_a3po.protocol.engine import Engine, EngineEvent, EngineStats, GroupRequest, SamplingSettings
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate


class SeveralEngines:
    """
    Args:
        engines: at least one, none of them started.
    """

    def __init__(self, engines: Sequence[Engine]):
        self._engines = list(engines)
        self._owners: dict[int, tuple[int, int]] = {}  # request -> its engine, and its rollouts
        self._loads = [0] * len(self._engines)
        self._scorers: dict[tuple, int] = {}
        self._turns = itertools.cycle(range(len(self._engines)))

    def start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        for engine in self._engines:
            engine.start(spec, sampling, update)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        shares: dict[int, list[GroupRequest]] = {}
        for request in requests:
            number = min(range(len(self._engines)), key=self._loads.__getitem__)
            self._owners[request.request_id] = number, request.num_rollouts
            self._loads[number] += request.num_rollouts
            shares.setdefault(number, []).append(request)
        for number, share in shares.items():
            self._engines[number].submit(share)

    def wait(self, timeout: float) -> list[EngineEvent]:
        events = [event for engine in self._engines for event in engine.wait(0.0)]
        for engine in self._engines:
            if not events:
                events += engine.wait(timeout / len(self._engines))
        for event in events:
            self._done(event.request_id)
        return events

    def cancel(self, request_ids: Sequence[int]) -> None:
        for engine in self._engines:
            engine.cancel(request_ids)
        for request_id in request_ids:
            self._done(request_id)

    def publish(self, update: WeightUpdate) -> None:
        for engine in self._engines:
            engine.publish(update)

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        """The same text is always scored by the same engine, and as many texts as there are engines by all of them:
        an engine that missed a publish would show."""
        text = (tuple(prompt_ids), tuple(completion_ids))
        if text not in self._scorers:
            self._scorers[text] = next(self._turns)
        return self._engines[self._scorers[text]].score(prompt_ids, completion_ids, timeout)

    def stats(self) -> EngineStats:
        """Sums, but for `busy_seconds`, which is the mean, so that tokens over it is what all of them give together,
        and `extra`, which is the largest of each."""
        every = [engine.stats() for engine in self._engines]
        names = {name for stats in every for name in stats.extra}
        return EngineStats(
            tokens=sum(stats.tokens for stats in every),
            busy_seconds=sum(stats.busy_seconds for stats in every) / len(every),
            active_rollouts=sum(stats.active_rollouts for stats in every),
            waiting_requests=sum(stats.waiting_requests for stats in every),
            restarts=sum(stats.restarts for stats in every),
            publish_seconds=sum(stats.publish_seconds for stats in every),
            awaits_publish=any(stats.awaits_publish for stats in every),
            extra={name: max(stats.extra.get(name, 0.0) for stats in every) for name in names},
        )

    def close(self) -> None:
        errors = []
        for engine in self._engines:
            try:
                engine.close()
            except Exception as error:  # the others are closed first
                errors.append(error)
        if errors:
            raise errors[0]

    def _done(self, request_id: int) -> None:
        number, rollouts = self._owners.pop(request_id, (0, 0))
        self._loads[number] -= rollouts
