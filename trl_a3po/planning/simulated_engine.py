"""Continuous batching in simulated time: sequences share an engine with a fixed number of slots.

Guarantees: a sequence gets a slot in the order in which it was submitted; all sequences with a slot decode at the same
pace, which the engine's speed gives for their number; a token has the version that was published when it was sampled.
"""

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable

from trl_a3po.planning.rates import EngineSpeed

ROUNDING = 1e-9  # of a token


class SimulatedEngine:
    """One engine.

    A sequence is decoded up to the position `progress at its start + its length`: `progress` counts decode steps, and
    every sequence with a slot gets one token per decode step. Progress is continuous.

    Args:
        speed: by the number of sequences.
        slots: most sequences at a time.
    """

    def __init__(self, speed: EngineSpeed, slots: int, version: int = 0):
        self._speed = speed
        self._slots = slots
        self._step_seconds: dict[int, float] = {}
        self._progress = 0.0
        self._now = 0.0
        self._decoding: list[tuple[float, int, float, int]] = []  # progress at the end, number, at the start, group
        self._waiting: deque[tuple[int, float]] = deque()  # group, length
        self._number = 0
        self._left: dict[int, int] = {}  # sequences of each group
        self._tokens: dict[int, dict[int, float]] = {}  # of each group, by version
        self._published: list[tuple[float, int]] = [(0.0, version)]  # progress at each publish
        self.idle_seconds = self.slot_seconds = 0.0

    def submit(self, now: float, group: int, lengths: Iterable[float]) -> None:
        """Add the sequences of a group."""
        self._advance(now)
        lengths = list(lengths)
        self._left[group], self._tokens[group] = len(lengths), defaultdict(float)
        self._waiting.extend((group, length) for length in lengths)
        self._fill()

    def publish(self, now: float, version: int) -> None:
        self._advance(now)
        self._published.append((self._progress, version))

    def next_end(self) -> float:
        """When the next sequence ends if nothing else happens; infinite if none is decoded."""
        if not self._decoding:
            return float("inf")
        return self._now + (self._decoding[0][0] - self._progress) * self._seconds_per_step()

    def ended(self, now: float) -> list[tuple[int, dict[int, float]]]:
        """The groups whose last sequence has ended by `now`, with their tokens by version."""
        self._advance(now)
        groups = []
        while self._decoding and self._decoding[0][0] <= self._progress + ROUNDING * max(1.0, self._progress):
            end, _, start, group = heapq.heappop(self._decoding)
            self._count(self._tokens[group], start, end)
            self._left[group] -= 1
            if not self._left[group]:
                del self._left[group]
                groups.append((group, self._tokens.pop(group)))
        self._fill()
        return groups

    def settle(self, now: float) -> None:
        """Bring `idle_seconds` and `slot_seconds` (slots in use, times seconds) up to `now`."""
        self._advance(now)

    def _seconds_per_step(self) -> float:
        count = len(self._decoding)
        if count not in self._step_seconds:
            self._step_seconds[count] = self._speed.step_seconds(count)
        return self._step_seconds[count]

    def _advance(self, now: float) -> None:
        passed, self._now = now - self._now, now
        if self._decoding:
            self._progress += passed / self._seconds_per_step()
            self.slot_seconds += passed * len(self._decoding)
        else:
            self.idle_seconds += passed

    def _fill(self) -> None:
        while self._waiting and len(self._decoding) < self._slots:
            group, length = self._waiting.popleft()
            self._number += 1
            heapq.heappush(self._decoding, (self._progress + length, self._number, self._progress, group))

    def _count(self, tokens: dict[int, float], start: float, end: float) -> None:
        """Add the tokens of a sequence that was decoded from progress `start` to `end`."""
        at = bisect_right(self._published, start, key=lambda entry: entry[0]) - 1
        while start < end:
            until = self._published[at + 1][0] if at + 1 < len(self._published) else end
            tokens[self._published[at][1]] += min(until, end) - start
            start, at = min(until, end), at + 1
