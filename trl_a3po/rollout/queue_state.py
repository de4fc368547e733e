"""What a `GenerationQueue` needs to go on in another process, as plain data.

Guarantees: dataset rows are not part of it, only the prompts' places in the stream and their tokens, so that a stream
which has changed is noticed; a group that was not finished is only its prompt, to be sampled again at its place in the
order.
"""

from dataclasses import dataclass, field

from trl_a3po.protocol.records import Rollout, Score
from trl_a3po.rollout.outcomes import Outcomes


@dataclass(frozen=True, slots=True)
class OutstandingState:
    """A prompt between the prompt stream and its take.

    Args:
        prompt_index: place of the prompt in the stream.
        prompt_ids: its tokens.
        submitted_version: published version when the attempt was submitted; without rollouts, of the lost attempt.
        attempt: number of the finished attempt, or of the one that comes next.
        failures: why each attempt before it failed.
        rollouts: the finished rollouts, `None` if there are none yet.
        score: their rewards, `None` if they are not known yet.
    """

    prompt_index: int
    prompt_ids: list[int]
    submitted_version: int
    attempt: int
    failures: list[str] = field(default_factory=list)
    rollouts: list[Rollout] | None = None
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class QueueState:
    """A snapshot of the queue between two takes.

    Args:
        next_take: number of the next take, counted over the whole run.
        cursor: prompts that have left the stream.
        published_version: the version the engine sampled from.
        last_taken_version: policy version at the last take.
        rejected_in_a_row: groups rejected since the last one that was not.
        outcomes: the books, attempts that the end of the process cuts off already booked as unused.
        outstanding: what waits to be taken, in submission order.
    """

    next_take: int
    cursor: int
    published_version: int
    last_taken_version: int
    rejected_in_a_row: int
    outcomes: Outcomes
    outstanding: list[OutstandingState]

    @property
    def first_row(self) -> int:
        """Row of the prompt stream to read on from: no earlier one is needed again."""
        return min((item.prompt_index for item in self.outstanding), default=self.cursor)
