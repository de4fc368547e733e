"""The ledger: what became of every prompt, and of every attempt at it.

Guarantees: every attempt ends in exactly one outcome, which is trained, rejected (with the reason), failed (with the
reason) or unused, and every prompt ends in exactly one outcome. Ending a prompt or an attempt twice, or one that never
began, raises. Therefore, at any time,

    attempts = sum of attempt outcomes + attempts still open,    prompts = sum of prompt outcomes + prompts still open.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

OutcomeKind = Literal["trained", "rejected", "failed", "unused"]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """A snapshot of the ledger.

    Args:
        prompts: prompts that have left the prompt stream.
        attempts: attempts that have been submitted to the engine.
        prompt_outcomes: outcome -> number of prompts. The outcomes are `"trained"`, `"rejected: <reason>"`,
            `"failed: <reason>"` and `"unused"`.
        attempt_outcomes: outcome -> number of attempts.
        open_prompts: prompts that have no final outcome yet; 0 once the queue is closed.
        open_attempts: attempts that have not ended yet; 0 once the queue is closed.
    """

    prompts: int
    attempts: int
    prompt_outcomes: dict[str, int]
    attempt_outcomes: dict[str, int]
    open_prompts: int
    open_attempts: int

    def count(self, kind: OutcomeKind) -> int:
        """How many prompts have a final outcome of this kind, whatever the reason."""
        return _count(self.prompt_outcomes, kind)

    def count_attempts(self, kind: OutcomeKind) -> int:
        """How many attempts have an outcome of this kind, whatever the reason."""
        return _count(self.attempt_outcomes, kind)

    def with_unused(self, attempts: int, reason: str) -> Self:
        """This snapshot with `attempts` of the open attempts ended as unused, for `reason`."""
        ended = Counter(self.attempt_outcomes) + Counter({outcome_name("unused", reason): attempts})
        return replace(self, attempt_outcomes=dict(ended), open_attempts=self.open_attempts - attempts)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """An attempt at a prompt that has ended.

    Times are seconds of the queue's clock. A time is `None` if the attempt did not get that far, or got there in an
    earlier process.

    Args:
        prompt: place of the prompt in the prompt stream.
        attempt: 1 for the first attempt at the prompt.
        outcome: `"trained"`, `"rejected: <reason>"`, `"failed: <reason>"` or `"unused"`.
        submitted_version: the published version when the attempt was submitted.
        oldest, newest: versions of the oldest and of the newest token, `None` if no rollouts came back.
        taken_version: the policy version at which the group was taken, `None` if it was not taken.
        tokens: completion tokens of its rollouts.
        lengths: completion tokens of each of its rollouts.
        submitted, finished, scoring, scored, ended: when the attempt went to the engine, when its rollouts came back,
            when scoring began, when the rewards were there, and when it got its outcome.
    """

    prompt: int
    attempt: int
    outcome: str
    submitted_version: int
    oldest: int | None
    newest: int | None
    taken_version: int | None
    tokens: int
    lengths: list[int]
    submitted: float | None
    finished: float | None
    scoring: float | None
    scored: float | None
    ended: float


class Ledger:
    """Counts prompts, attempts and their outcomes. The caller holds the lock."""

    def __init__(self) -> None:
        self._prompts = 0
        self._attempts = 0
        self._open_prompts: set[int] = set()
        self._open_attempts: set[int] = set()
        self._prompt_outcomes: Counter[str] = Counter()
        self._attempt_outcomes: Counter[str] = Counter()

    @classmethod
    def restored(cls, outcomes: Outcomes, open_prompts: Iterable[int], open_attempts: Iterable[int]) -> Self:
        """The ledger of an earlier process, continued.

        Args:
            outcomes: what that process had counted.
            open_prompts: indices of the prompts that are still open.
            open_attempts: request ids of the attempts that are still open.
        """
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

    def end_attempt(self, request_id: int, kind: OutcomeKind, reason: str | None = None) -> None:
        _close(self._open_attempts, request_id, "request")
        self._attempt_outcomes[outcome_name(kind, reason)] += 1

    def end_prompt(self, index: int, kind: OutcomeKind, reason: str | None = None) -> None:
        _close(self._open_prompts, index, "prompt")
        self._prompt_outcomes[outcome_name(kind, reason)] += 1

    def snapshot(self) -> Outcomes:
        return Outcomes(
            prompts=self._prompts,
            attempts=self._attempts,
            prompt_outcomes=dict(self._prompt_outcomes),
            attempt_outcomes=dict(self._attempt_outcomes),
            open_prompts=len(self._open_prompts),
            open_attempts=len(self._open_attempts),
        )


def outcome_name(kind: OutcomeKind, reason: str | None) -> str:
    """The name under which an outcome is counted."""
    return f"{kind}: {reason}" if reason else kind


def _close(opened: set[int], number: int, what: str) -> None:
    if number not in opened:
        raise ValueError(f"The outcome of {what} {number} was recorded twice, or the {what} never began.")
    opened.remove(number)


def _count(outcomes: dict[str, int], kind: OutcomeKind) -> int:
    return sum(count for name, count in outcomes.items() if name == kind or name.startswith(f"{kind}: "))
