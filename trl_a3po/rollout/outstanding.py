"""A prompt between the prompt stream and its take: where it is, and what an attempt at it may bring back.

Guarantees: a group is complete and its tokens were sampled from versions that were published in its attempt, or an
error says what the engine did.
"""

from dataclasses import dataclass, field
from typing import Literal, Self

from trl_a3po.errors import EngineError, StampError
from trl_a3po.protocol.engine import GroupFinished
from trl_a3po.protocol.records import Group, Prompt, Rollout
from trl_a3po.rollout.outcomes import Attempt
from trl_a3po.rollout.queue_state import OutstandingState

Stage = Literal["to submit", "in the engine", "waiting for its reward", "being scored", "ready"]
FINISHED: tuple[Stage, ...] = ("waiting for its reward", "being scored", "ready")


@dataclass(slots=True, eq=False)
class Outstanding:
    """One of them.

    `since` is when it left the prompt stream, `stage_since` when it entered its stage, `entered` when its attempt
    entered each of its stages in this process, all in the clock's seconds; `oldest` and `newest` are the versions of
    its group's tokens, `None` where no policy sampled any.
    """

    prompt: Prompt
    since: float
    stage_since: float
    stage: Stage = "to submit"
    request_id: int = -1
    attempt: int = 0
    submitted_version: int = 0
    group: Group | None = None
    oldest: int | None = None
    newest: int | None = None
    failures: list[str] = field(default_factory=list)
    entered: dict[Stage, float] = field(default_factory=dict)

    @classmethod
    def restored(cls, saved: OutstandingState, prompt: Prompt, now: float) -> Self:
        """What `saved` stands for, with the prompt as the stream has it now; the request is still to be numbered.

        Raises:
            ValueError: the prompt is not the one it was.
        """
        if list(prompt.token_ids) != saved.prompt_ids:
            raise ValueError(
                f"Prompt {saved.prompt_index} of the prompt stream is not the one it was when the checkpoint was "
                "saved: resume with the dataset, the tokenizer and the chat template of that run."
            )
        item = cls(prompt, since=now, stage_since=now, failures=list(saved.failures))
        if saved.rollouts is None:
            item.attempt = saved.attempt - 1
            return item
        item.attempt, item.submitted_version = saved.attempt, saved.submitted_version
        item.hold(Group(prompt, saved.rollouts, saved.score, saved.submitted_version, saved.attempt))
        item.stage = "waiting for its reward" if saved.score is None else "ready"
        return item

    def hold(self, group: Group) -> None:
        """It has this group from now on.

        Raises:
            StampError: a version is below -1.
        """
        self.oldest, self.newest = _version_range(group.rollouts)
        self.group = group

    def finish(self, event: GroupFinished, num_rollouts: int, *, lagged: bool) -> None:
        """Hold what the attempt brought back; `lagged` where nothing can have been published meanwhile.

        Raises:
            EngineError: the number of rollouts is wrong, or they are something else.
            StampError: a token is older than what was published when the attempt was submitted, or newer than can be.
        """
        if len(event.rollouts) != num_rollouts:
            raise EngineError(
                f"The engine returned {len(event.rollouts)} rollouts for prompt {self.prompt.index}, but "
                f"{num_rollouts} were asked for: a group is complete or it has failed."
            )
        strangers = [type(rollout).__name__ for rollout in event.rollouts if not isinstance(rollout, Rollout)]
        if strangers:
            raise EngineError(
                f"The engine returned a {strangers[0]} for prompt {self.prompt.index}: GroupFinished holds a list of "
                "trl_a3po.protocol.records.Rollout."
            )
        self.hold(Group(self.prompt, event.rollouts, submitted_version=self.submitted_version, attempt=self.attempt))
        if self.oldest is not None and self.oldest < self.submitted_version:
            raise StampError(
                f"{self._stamped(self.oldest)}, but version {self.submitted_version} was published before it was "
                "submitted."
            )
        if lagged and self.newest is not None and self.newest > self.submitted_version:
            raise StampError(
                f"{self._stamped(self.newest)}, but nothing newer than version {self.submitted_version} was published."
            )

    def check_taken_at(self, version: int) -> None:
        """Raise `StampError` for a token that claims a version newer than the trainer's."""
        if self.newest is not None and self.newest > version:
            raise StampError(
                f"{self._stamped(self.newest)}, but the trainer is at version {version}: nothing newer can have been "
                "published."
            )

    def ended(self, outcome: str, taken_version: int | None, now: float) -> Attempt:
        """The attempt, which ends with this `outcome`."""
        finished = self.stage in FINISHED
        return Attempt(
            prompt=self.prompt.index,
            attempt=self.attempt,
            outcome=outcome,
            submitted_version=self.submitted_version,
            oldest=self.oldest if finished else None,
            newest=self.newest if finished else None,
            taken_version=taken_version,
            tokens=sum(len(rollout.token_ids) for rollout in self.group.rollouts) if finished else 0,
            submitted=self.entered.get("in the engine"),
            finished=self.entered.get("waiting for its reward"),
            scoring=self.entered.get("being scored"),
            scored=self.entered.get("ready"),
            ended=now,
        )

    def saved(self) -> OutstandingState:
        """What another process needs to go on with it; an attempt in the engine is lost."""
        finished = self.stage in FINISHED
        return OutstandingState(
            prompt_index=self.prompt.index,
            prompt_ids=list(self.prompt.token_ids),
            submitted_version=self.submitted_version,
            attempt=self.attempt + 1 if self.stage == "to submit" else self.attempt,
            failures=list(self.failures),
            rollouts=list(self.group.rollouts) if finished else None,
            score=self.group.score if self.stage == "ready" else None,
        )

    def _stamped(self, version: int) -> str:
        return (
            f"The engine stamped a token of prompt {self.prompt.index} (attempt {self.attempt}) with version {version}"
        )


def _version_range(rollouts: list[Rollout]) -> tuple[int | None, int | None]:
    """Oldest and newest version of the tokens that a policy sampled, `None` where none did."""
    versions = {version for rollout in rollouts for version in rollout.versions}
    if min(versions) < -1:
        raise StampError(f"The engine stamped a token with version {min(versions)}: versions are 0 or more, or -1.")
    versions.discard(-1)
    return (min(versions), max(versions)) if versions else (None, None)
