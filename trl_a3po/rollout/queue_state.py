"""What a `GenerationQueue` needs to continue in another process, as plain data.

Guarantees: dataset rows are not part of the state. It holds each prompt's place in the prompt stream, a digest of the
row's prompt, so that a stream that has changed is noticed, and its tokens, which are not made again: a chat template
may give others on another day. Of a group that was not finished, only the prompt is kept: it is sampled again at its
place in the order.
"""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, Self

from trl_a3po.protocol.images import PromptImages, is_image
from trl_a3po.protocol.records import Rollout, Score
from trl_a3po.rollout.outcomes import Outcomes


@dataclass(frozen=True, slots=True)
class OutstandingState:
    """A prompt that has left the prompt stream and has not been taken.

    Args:
        prompt_index: place of the prompt in the prompt stream.
        prompt_ids: its tokens, `None` if they are to be made again from the row.
        submitted_version: the published version when the attempt was submitted.
        attempt: number of the finished attempt; if none is finished, of the one that comes next.
        failures: why each earlier attempt failed.
        rollouts: the finished rollouts, `None` if there are none yet.
        score: their rewards, `None` if they are not known yet.
        prompt_digest: digest of the row's prompt (see `prompt_digest`).
    """

    prompt_index: int
    prompt_ids: list[int] | None
    submitted_version: int
    attempt: int
    failures: list[str] = field(default_factory=list)
    rollouts: list[Rollout] | None = None
    score: Score | None = None
    prompt_digest: str = ""


@dataclass(frozen=True, slots=True)
class QueueState:
    """A snapshot of the queue between two takes.

    Args:
        next_take: number of the next take, counted over the whole run.
        cursor: prompts that have left the prompt stream.
        published_version: the version the engine sampled from.
        last_taken_version: the policy version at the last take.
        rejected_in_a_row: groups rejected since the last group that was accepted.
        outcomes: the ledger, in which the attempts that end with the process are already counted as unused.
        outstanding: the prompts that wait to be taken, in submission order.
        left_out: reason -> how many rows before the cursor were left out for it.
    """

    next_take: int
    cursor: int
    published_version: int
    last_taken_version: int
    rejected_in_a_row: int
    outcomes: Outcomes
    outstanding: list[OutstandingState]
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def first_row(self) -> int:
        """The row of the prompt stream to read from: no earlier row is needed again."""
        return min((item.prompt_index for item in self.outstanding), default=self.cursor)

    def without_unscored_rollouts(self) -> Self:
        """This state with every prompt to be sampled again whose rollouts have no score: the environments that their
        scores may need are gone."""
        unscored = sum(item.rollouts is not None and item.score is None for item in self.outstanding)
        return replace(
            self,
            outcomes=self.outcomes.with_unused(unscored, "cut off, sampled again"),
            outstanding=[replace(item, rollouts=None) if item.score is None else item for item in self.outstanding],
        )

    def without_rollouts(self, *, keeps_prompts: bool) -> Self:
        """This state with every outstanding prompt to be sampled again.

        Args:
            keeps_prompts: the tokens of the prompts stay; otherwise they are made again from the rows.
        """
        finished = sum(item.rollouts is not None for item in self.outstanding)
        return replace(
            self,
            outcomes=self.outcomes.with_unused(finished, "sampled again with other settings"),
            outstanding=[
                replace(item, rollouts=None, score=None, prompt_ids=item.prompt_ids if keeps_prompts else None)
                for item in self.outstanding
            ],
        )


def prompt_digest(row: dict[str, Any], images: PromptImages | None = None) -> str:
    """A short text that differs for rows with different prompts, or with different images in their columns.

    Args:
        images: those that the prompt shows. They may come from files, of which the row has only the names.
    """
    columns = "".join(repr(_described(row[name])) for name in ("images", "image") if row.get(name))
    shown = "" if images is None else repr(_described(list(images.images)))
    return hashlib.sha256(f"{_described(row.get('prompt'))!r}{columns}{shown}".encode()).hexdigest()[:16]


def _described(value: Any) -> Any:
    """`value` with the size and a digest of the pixels in place of each PIL image."""
    if isinstance(value, list):
        return [_described(item) for item in value]
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    if not is_image(value):
        return value
    return value.mode, value.size, hashlib.sha256(value.tobytes()).hexdigest()
