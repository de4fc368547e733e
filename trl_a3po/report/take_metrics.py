"""Metrics of a take: how long it waited, what the queue held, and the state of the engine and of the rewards.

Guarantees: where several takes make up a generation batch, their seconds are added up; counts are totals of the run so
far, not means over a logging interval.
"""

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from trl_a3po.protocol.engine import EngineStats
from trl_a3po.protocol.records import Group

Metric = dict[str, float]
Metrics = dict[str, list[float]]  # as TRL's: the mean of each list is logged


def add_seconds(metrics: Metrics, name: str, seconds: float, *, first: bool) -> None:
    """Add the seconds of a take to those of its generation batch, of which it is the `first` take or a later one."""
    if first:
        metrics[name].append(0.0)
    metrics[name][-1] += seconds


class TakeMetrics:
    """Metrics of the takes of a run, in the main process.

    Args:
        is_vllm: whether the `extra` numbers of the engine are those of vLLM servers.
    """

    def __init__(self, *, is_vllm: bool):
        self._is_vllm = is_vllm
        self._last_batch: tuple[float, float] | None = None  # when it was taken, seconds blocked before
        self._waited = 0.0

    def add(self, metrics: Metrics, session: Any, groups: Sequence[Group], waited: float, *, first: bool) -> None:
        """Add a take that returned `groups` after `waited` seconds, as the `first` take of its generation batch or a
        later one."""
        status, engine = session.queue.status(), session.engine.stats()
        self._waited += waited
        if first:
            now = time.perf_counter()
            if self._last_batch is not None:
                taken_at, blocked_before = self._last_batch
                metrics["a3po/time/idle_share"].append(self._waited / (now - taken_at))
                metrics["a3po/time/blocked"].append(status.staleness_blocked_seconds - blocked_before)
            self._last_batch, self._waited = (now, status.staleness_blocked_seconds), 0.0
        add_seconds(
            metrics,
            "a3po/time/reward",
            sum(group.score.seconds for group in groups if group.score is not None),
            first=first,
        )
        episodes = _episode_metrics(groups)
        for name, value in episodes.items():
            metrics[name].append(value)
        if episodes and not self._is_vllm:
            metrics["a3po/engine/turns_prefilled_again"] = [float(engine.turns_prefilled_again)]
        metrics["a3po/queue/ready"].append(float(status.ready))
        metrics["a3po/queue/outstanding"].append(float(status.outstanding))
        metrics["a3po/engine/tokens_per_second"].append(engine.tokens / max(engine.busy_seconds, 1e-9))
        metrics["a3po/engine/restarts"].append(float(engine.restarts))
        for gap in session.measured_gaps():
            metrics["a3po/delivery/gap"].append(gap)
        for name, count in self._totals(session, engine).items():
            metrics[name] = [float(count)]

    def _totals(self, session: Any, engine: EngineStats) -> dict[str, float]:
        outcomes = session.queue.outcomes()
        counts = {f"a3po/outcomes/{kind}": outcomes.count_attempts(kind) for kind in ("rejected", "failed")}
        counts["a3po/rows/left_out"] = session.rows_left_out
        counts |= {f"a3po/reward/{kind}": count for kind, count in session.reward_worker_failures.items()}
        return counts | {f"a3po/vllm/{name}": count for name, count in engine.extra.items() if self._is_vllm}


def _episode_metrics(groups: Sequence[Group]) -> Metric:
    """Means over the episodes of a take; empty if its rollouts are no episodes."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if not episodes:
        return {}
    spans = [max(rollout.sampled_versions) - min(rollout.sampled_versions) for rollout in rollouts]
    return {
        "a3po/episodes/turns": fmean(episode.turns for episode in episodes),
        "a3po/episodes/tool_seconds": fmean(episode.tool_seconds for episode in episodes),
        "a3po/episodes/tool_timeouts": float(sum(episode.tool_timeouts for episode in episodes)),
        "a3po/episodes/version_span": fmean(spans),
        "a3po/episodes/cut_off": fmean(episode.end in ("length", "overlong tool result") for episode in episodes),
    }
