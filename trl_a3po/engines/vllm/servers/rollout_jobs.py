"""Rollouts on their way through the servers: the tokens sampled so far, and the calls that sample the rest.

Guarantees: no threads and no I/O; the three lists of a rollout grow together; what was sampled is not sampled
again.
"""

import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from trl_a3po.engines.vllm.servers.http import AnswerFault
from trl_a3po.engines.vllm.servers.token_chunks import TokenChunk
from trl_a3po.protocol.engine import GroupFailed, GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.records import Rollout

MOST_BACKOFF = 8.0


@dataclass(slots=True, eq=False)
class PartialRollout:
    """A rollout and the tokens that have been sampled so far."""

    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None

    def add(self, chunk: TokenChunk, versions: list[int], sampling: SamplingSettings) -> None:
        """Append a server's tokens, sampled from `versions`.

        Raises:
            AnswerFault: they cannot be the answer; the sequence is as before.
        """
        length = len(self.token_ids) + len(chunk.token_ids)
        if self.finish is not None or length > sampling.max_new_tokens:
            raise AnswerFault(
                f"A completion of {length} tokens is longer than the {sampling.max_new_tokens} asked for."
            )
        last = chunk.token_ids[-1] if chunk.token_ids else None
        if chunk.finish == "stop" and last not in sampling.stop_token_ids:
            raise AnswerFault(
                f"A completion stopped at token {last}, which is not among the stop tokens {sampling.stop_token_ids}: "
                "the server has stop tokens of its own; start it with --generation-config vllm."
            )
        if chunk.finish == "length" and length < sampling.max_new_tokens:
            raise AnswerFault(
                f"A completion was cut at {length} tokens, before the {sampling.max_new_tokens} asked for."
            )
        self.token_ids += chunk.token_ids
        self.logps += chunk.logps
        self.versions += versions
        if chunk.finish in ("stop", "length"):
            self.finish = chunk.finish

    def rollout(self) -> Rollout:
        if self.finish is None:
            raise ValueError("The rollout is not finished.")
        return Rollout(self.token_ids, self.logps, self.versions, self.finish)


@dataclass(slots=True, eq=False)
class PartialGroup:
    """A request and its rollouts, finished or not."""

    request: GroupRequest
    sampling: SamplingSettings  # of this request
    sequences: list[PartialRollout]
    cancelled: bool = False

    @classmethod
    def of(cls, request: GroupRequest, sampling: SamplingSettings) -> "PartialGroup":
        return cls(request, request.settings(sampling), [PartialRollout() for _ in range(request.num_rollouts)])

    def number_of(self, sequence: PartialRollout) -> int:
        """The number of a sequence within the group of the request."""
        return self.request.first_rollout + self.sequences.index(sequence)

    @property
    def finished(self) -> bool:
        return all(sequence.finish for sequence in self.sequences)

    def event(self) -> GroupFinished | GroupFailed:
        return GroupFinished(self.request.request_id, [sequence.rollout() for sequence in self.sequences])


@dataclass(slots=True, eq=False)
class Job:
    """Sequences of a group that go out as one call: all of them while none is begun, or a single one.

    Args:
        tries: calls of it that failed, in a row.
        not_before: when the next may be made, on the monotonic clock.
    """

    group: PartialGroup
    sequences: list[PartialRollout]
    tries: int = 0
    not_before: float = 0.0

    @property
    def number(self) -> int:
        """Of its first rollout, among those of its group."""
        return self.group.number_of(self.sequences[0])

    @property
    def has_begun(self) -> bool:
        """Whether something of it was sampled before: of the completion, or turns before this one."""
        return self.group.request.first_position > 0 or bool(self.sequences[0].token_ids)

    @property
    def prompt_ids(self) -> list[int]:
        return [*self.group.request.prompt_ids, *self.sequences[0].token_ids]

    def rest(self, *, failed: bool) -> list["Job"]:
        """What is left to do, after a call that `failed` or was cut off as intended."""
        tries = self.tries + 1 if failed else 0
        not_before = time.monotonic() + min(MOST_BACKOFF, 0.25 * 2**tries) if failed else 0.0
        left = [sequence for sequence in self.sequences if not sequence.finish]
        if any(sequence.token_ids for sequence in left):
            return [Job(self.group, [sequence], tries, not_before) for sequence in left]
        return [Job(self.group, left, tries, not_before)] if left else []


class JobQueue:
    """Jobs that wait for a server, in order: jobs that were cut off or failed, later turns, and prompts."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def append(self, job: Job) -> None:
        begun = sum(1 for _ in itertools.takewhile(lambda waiting: waiting.has_begun, self._jobs))
        self._jobs.insert(begun if job.has_begun else len(self._jobs), job)

    def put_back(self, jobs: list[Job]) -> None:
        self._jobs.extendleft(reversed(jobs))

    def due(self) -> list[Job]:
        now = time.monotonic()
        return [job for job in self._jobs if job.not_before <= now]

    def remove(self, job: Job) -> None:
        self._jobs.remove(job)

    def drop_cancelled(self) -> None:
        self._jobs = deque(job for job in self._jobs if not job.group.cancelled)

    def clear(self) -> None:
        self._jobs.clear()

    def __len__(self) -> int:
        return len(self._jobs)
