"""Several engines as one: a request goes to the engine with the least to do, a later turn to the engine that sampled
the turns before, and a publish goes to all engines.

Guarantees: those of `protocol/engine.py`, as each of the engines gives them. A token carries the version of the engine
that sampled it. When `publish` returns, every engine has the published weights. An engine that is beyond recovery ends
the run, as a single engine would.
"""

from collections.abc import Sequence

from trl_a3po.engines.scorer_choice import ScorerChoice
from trl_a3po.protocol.engine import Engine, EngineEvent, EngineStats, GroupRequest, SamplingSettings
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate


class SeveralEngines:
    """
    Args:
        engines: at least one engine. No engine has been started.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._owners: dict[int, tuple[int, int]] = {}  # by request: the engine's number, and how many rollouts
        self._homes: dict[int, int] = {}  # by episode: the number of the engine that sampled its turns
        self._loads = [0] * len(self._engines)
        self._scorers = ScorerChoice()

    def start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        for engine in self._engines:
            engine.start(spec, sampling, update)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        shares: dict[int, list[GroupRequest]] = {}
        for request in requests:
            number = self._engine_for(request)
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

    def end_episodes(self, episodes: Sequence[int]) -> None:
        for engine in self._engines:
            engine.end_episodes(episodes)
        for episode in episodes:
            self._homes.pop(episode, None)

    def publish(self, update: WeightUpdate) -> None:
        for engine in self._engines:
            engine.publish(update)

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        """See `Engine.score`. A text is always scored by the same engine (`ScorerChoice`)."""
        text = (tuple(prompt_ids), tuple(completion_ids))
        number = self._scorers.choose(text, range(len(self._engines)))
        return self._engines[number].score(prompt_ids, completion_ids, timeout)

    def stats(self) -> EngineStats:
        """The sums of the engines' numbers, with two exceptions: `busy_seconds` is the mean, so that tokens per busy
        second is the rate of all engines together, and `extra` holds the largest value of each number."""
        every = [engine.stats() for engine in self._engines]
        names = {name for stats in every for name in stats.extra}
        return EngineStats(
            tokens=sum(stats.tokens for stats in every),
            busy_seconds=sum(stats.busy_seconds for stats in every) / len(every),
            active_rollouts=sum(stats.active_rollouts for stats in every),
            waiting_requests=sum(stats.waiting_requests for stats in every),
            turns_prefilled_again=sum(stats.turns_prefilled_again for stats in every),
            restarts=sum(stats.restarts for stats in every),
            publish_seconds=sum(stats.publish_seconds for stats in every),
            awaits_publish=any(stats.awaits_publish for stats in every),
            is_stopped=any(stats.is_stopped for stats in every),
            trouble="; ".join(stats.trouble for stats in every if stats.trouble),
            extra={name: max(stats.extra.get(name, 0.0) for stats in every) for name in names},
        )

    def close(self) -> None:
        errors = []
        for engine in self._engines:
            try:
                engine.close()
            except Exception as error:  # raised once the other engines are closed
                errors.append(error)
        if errors:
            raise errors[0]

    def _engine_for(self, request: GroupRequest) -> int:
        """The engine that sampled the turns before, which may have kept their keys and values; otherwise the one with
        the least to do."""
        first, least = request.first_episode, min(range(len(self._engines)), key=self._loads.__getitem__)
        if first is None:
            return least
        number = self._homes.get(first, least)
        self._homes.update(dict.fromkeys(range(first, first + request.num_rollouts), number))
        return number

    def _done(self, request_id: int) -> None:
        number, rollouts = self._owners.pop(request_id, (0, 0))
        self._loads[number] -= rollouts
