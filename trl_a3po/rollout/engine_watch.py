"""Whether the engine gets on, by its own numbers, while the main thread waits for its groups.

Guarantees: tokens are progress, so an engine that samples one long group is not stalled; but no more tokens than its
groups can have, so one that samples without an end is. Time in which the engine's worker is stopped does not count.
"""

from trl_a3po.protocol.engine import EngineStats


class EngineWatch:
    """What the engine has done since something was last heard of it."""

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._events = -1
        self._tokens_at_event = 0
        self._most_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens sampled since the last event."""
        return self._stats.tokens - self._tokens_at_event

    def gets_on(self, stats: EngineStats, events: int, most_tokens: int | None) -> bool:
        """Whether the engine has sampled since the last call, or is stopped and will go on when it is continued.

        Args:
            stats: the engine's numbers now.
            events: how many events there have been.
            most_tokens: most tokens that the groups in the engine can have together, `None` if that is not known.
        """
        before, self._stats, self._most_tokens = self._stats.tokens, stats, most_tokens
        if events != self._events:
            # Tokens sampled between the event and this look count too, unless no group was left that they can be of.
            self._events, self._tokens_at_event = events, stats.tokens if most_tokens == 0 else before
        return stats.is_stopped or (stats.tokens > before and not self._is_endless)

    @property
    def _is_endless(self) -> bool:
        return self._most_tokens is not None and self.tokens > self._most_tokens

    def __str__(self) -> str:
        stats = self._stats
        too_many = f", more than its groups can have ({self._most_tokens})" if self._is_endless else ""
        return (
            f"{self.tokens} tokens sampled since the last event{too_many}; {stats.active_rollouts} rollouts being "
            f"decoded, {stats.waiting_requests} requests waiting{'; ' if stats.trouble else ''}{stats.trouble}"
        )
