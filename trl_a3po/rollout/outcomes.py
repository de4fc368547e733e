"""The ledger: what became of every prompt and of every attempt at it.

Guarantees: an attempt ends in exactly one of trained, rejected: why, failed: why, unused; a prompt in exactly one
final outcome; ending either twice, or one that never began, raises. So at any time

    attempts = sum of attempt outcomes + attempts still open,    prompts = sum of prompt outcomes + prompts still open.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

Kind = Literal["trained", "rejected", "failed", "unused"]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """A snapshot of the ledger.

    Args:
        prompts: prompts that left the prompt stream.
        attempts: attempts submitted to the engine.
        prompt_outcomes: `"trained"`, `"rejected: why"`, `"failed: why"` or `"unused"` -> prompts.
        attempt_outcomes: the same, counting attempts.
        open_prompts: prompts without a final outcome yet; 0 once the queue is closed.
        open_attempts: attempts not ended yet; 0 once the queue is closed.
    """

    prompts: int
    attempts: int
    prompt_outcomes: dict[str, int]
    attempt_outcomes: dict[str, int]
    open_prompts: int
    open_attempts: int

    def count(self, kind: Kind) -> int:
        """Prompts whose final outcome is of this kind, whatever the reason."""
        return _count(self.prompt_outcomes, kind)

    def count_attempts(self, kind: Kind) -> int:
        """Attempts whose outcome is of this kind, whatever the reason."""
        return _count(self.attempt_outcomes, kind)


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a prompt that has ended.

    Times are seconds of the queue's clock, `None` where the attempt did not get there, or did in an earlier process.

    Args:
        prompt: place of the prompt in the stream.
        attempt: 1 for the first attempt at it.
        outcome: `"trained"`, `"rejected: why"`, `"failed: why"` or `"unused"`.
        submitted_version: published version when it was submitted.
        oldest, newest: versions of its tokens, `None` where no rollouts came.
        taken_version: policy version at its take, `None` where it was not taken.
        tokens: completion tokens of its rollouts.
        submitted, finished, scoring, scored, ended: when it went to the engine, came back, began to be scored, had its
            rewards, and got its outcome.
    """

    prompt: int
    attempt: int
    outcome: str
    submitted_version: int
    oldest: int | None
    newest: int | None
    taken_version: int | None
    tokens: int
    submitted: float | None
    finished: float | None
    scoring: float | None
    scored: float | None
    ended: float


class Ledger:
    """Books prompts and attempts; the caller holds the lock."""

    def __init__(self):
        self._prompts = 0
        self._attempts = 0
        self._open_prompts: set[int] = set()
        self._open_attempts: set[int] = set()
        self._prompt_outcomes: Counter[str] = Counter()
        self._attempt_outcomes: Counter[str] = Counter()

    @classmethod
    def restored(cls, outcomes: Outcomes, open_prompts: Iterable[int], open_attempts: Iterable[int]) -> Self:
        """The books of an earlier process, carried on: what is open, by prompt index and by request id."""
        ledger = cls()
        ledger._prompts, ledger._attempts = outcomes.prompts, outcomes.attempts
        ledger._open_prompts, ledger._open_attempts = set(open_prompts), set(open_attempts)
        ledger._prompt_outcomes = Counter(outcomes.prompt_outcomes)
        ledger._attempt_outcomes = Counter(outcomes.attempt_outcomes)
        return ledger

    def prompt_popped(self, index: int) -> None:
        if index in self._open_prompts:
            raise ValueError(f"Prompt {index} left the prompt stream twice.")
        self._prompts += 1
        self._open_prompts.add(index)

    def attempt_submitted(self, request_id: int) -> None:
        if request_id in self._open_attempts:
            raise ValueError(f"Request {request_id} was submitted twice.")
        self._attempts += 1
        self._open_attempts.add(request_id)

    def end_attempt(self, request_id: int, kind: Kind, why: str | None = None) -> None:
        _close(self._open_attempts, request_id, "request")
        self._attempt_outcomes[outcome_name(kind, why)] += 1

    def end_prompt(self, index: int, kind: Kind, why: str | None = None) -> None:
        _close(self._open_prompts, index, "prompt")
        self._prompt_outcomes[outcome_name(kind, why)] += 1

    def snapshot(self) -> Outcomes:
        return Outcomes(
            prompts=self._prompts,
            attempts=self._attempts,
            prompt_outcomes=dict(self._prompt_outcomes),
            attempt_outcomes=dict(self._attempt_outcomes),
            open_prompts=len(self._open_prompts),
            open_attempts=len(self._open_attempts),
        )


def outcome_name(kind: Kind, why: str | None) -> str:
    """What the books call an outcome."""
    return f"{kind}: {why}" if why else kind


def _close(opened: set[int], number: int, what: str) -> None:
    if number not in opened:
        raise ValueError(f"The outcome of {what} {number} was booked twice, or it never began.")
    opened.remove(number)


def _count(outcomes: dict[str, int], kind: Kind) -> int:
    return sum(count for name, count in outcomes.items() if name == kind or name.startswith(f"{kind}: "))
