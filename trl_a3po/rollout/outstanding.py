"""A prompt on its way from the prompt stream to a take: the stage it has reached, and what came back from the engine.

Guarantees: a group is complete, and its tokens were sampled from versions that were published during its attempt;
otherwise an error says what the engine did.
"""

from dataclasses import dataclass, field
from typing import Literal, Self

from trl_a3po.errors import EngineError, StampError
from trl_a3po.protocol.engine import GroupFinished
from trl_a3po.protocol.records import Group, Prompt, Rollout
from trl_a3po.rollout.outcomes import AttemptRecord
from trl_a3po.rollout.queue_state import OutstandingState, prompt_digest

Stage = Literal["to submit", "in the engine", "waiting for its reward", "being scored", "ready"]
FINISHED: tuple[Stage, ...] = ("waiting for its reward", "being scored", "ready")


@dataclass(slots=True, eq=False)
class OutstandingPrompt:
    """A prompt that has left the prompt stream and has no final outcome yet.

    Args:
        prompt: the prompt.
        popped_at: when it left the prompt stream, on the clock that stands still while the process is stopped.
        stage_entered_at: when it entered its present stage, on the same clock.
        stage: its present stage.
        request_id: id of the present attempt in the engine.
        attempt: number of the present attempt, 0 before the first one.
        submitted_version: the published version when the present attempt was submitted.
        group: its rollouts, `None` until the engine has finished them.
        oldest, newest: versions of the group's oldest and newest token, `None` if no policy sampled any.
        failures: why each earlier attempt failed.
        stage_times: when the present attempt entered each of its stages in this process, on the monotonic clock.
    """

    prompt: Prompt
    popped_at: float
    stage_entered_at: float
    stage: Stage = "to submit"
    request_id: int = -1
    attempt: int = 0
    submitted_version: int = 0
    group: Group | None = None
    oldest: int | None = None
    newest: int | None = None
    failures: list[str] = field(default_factory=list)
    stage_times: dict[Stage, float] = field(default_factory=dict)

    @classmethod
    def restored(cls, saved: OutstandingState, prompt: Prompt, now: float) -> Self:
        """The outstanding prompt that `saved` describes; its request id is still to be assigned.

        Args:
            prompt: the prompt, with the row that the prompt stream has now.

        Raises:
            ValueError: the row has another prompt than when it was saved.
        """
        if prompt_digest(prompt.example, prompt.images) != saved.prompt_digest:
            raise ValueError(
                f"Prompt {saved.prompt_index} of the prompt stream is not the one it was when the checkpoint was "
                "saved: resume with the dataset of that run, and with its images."
            )
        item = cls(prompt, popped_at=now, stage_entered_at=now, failures=list(saved.failures))
        if saved.rollouts is None:
            item.attempt = saved.attempt - 1
            return item
        item.attempt, item.submitted_version = saved.attempt, saved.submitted_version
        item.set_group(Group(prompt, saved.rollouts, saved.score, saved.submitted_version, saved.attempt))
        item.stage = "waiting for its reward" if saved.score is None else "ready"
        return item

    @property
    def finished_group(self) -> Group:
        """The group of a prompt that the engine has finished."""
        assert self.group is not None, "the engine has not finished this prompt"
        return self.group

    def set_group(self, group: Group) -> None:
        """Make `group` the prompt's group.

        Raises:
            StampError: a version is below -1.
        """
        self.oldest, self.newest = _version_range(group.rollouts)
        self.group = group

    def forget_group(self) -> None:
        """The prompt has no group any more: it is to be sampled again."""
        self.group = self.oldest = self.newest = None

    def was_in_engine(self, since: float) -> bool:
        """Whether the present attempt was in the engine at the time `since` or later."""
        submitted, finished = (self.stage_times.get(name) for name in ("in the engine", "waiting for its reward"))
        return self.stage != "to submit" and submitted is not None and (finished is None or finished >= since)

    def receive(self, event: GroupFinished, num_rollouts: int, *, lagged: bool) -> None:
        """Keep the rollouts that the engine returned.

        Args:
            event: the engine's report.
            num_rollouts: how many rollouts were requested.
            lagged: nothing can have been published since the attempt was submitted (`schedule="fixed_lag"`).

        Raises:
            EngineError: the number of rollouts is wrong, or an object in the list is not a `Rollout`.
            StampError: a token is older than the version published when the attempt was submitted, or newer than
                any version it can come from.
        """
        if len(event.rollouts) != num_rollouts:
            raise EngineError(
                f"The engine returned {len(event.rollouts)} rollouts for prompt {self.prompt.index}, but "
                f"{num_rollouts} were requested: a group is complete or it has failed."
            )
        others = [type(rollout).__name__ for rollout in event.rollouts if not isinstance(rollout, Rollout)]
        if others:
            raise EngineError(
                f"The engine returned a {others[0]} for prompt {self.prompt.index}: GroupFinished holds a list of "
                "trl_a3po.protocol.records.Rollout."
            )
        group = Group(self.prompt, event.rollouts, submitted_version=self.submitted_version, attempt=self.attempt)
        self.set_group(group)
        if self.oldest is not None and self.oldest < self.submitted_version:
            raise StampError(
                f"{self._stamped(self.oldest)}, but version {self.submitted_version} was published before the "
                "attempt was submitted."
            )
        if lagged and self.newest is not None and self.newest > self.submitted_version:
            raise StampError(
                f"{self._stamped(self.newest)}, but nothing newer than version {self.submitted_version} was published."
            )

    def check_taken_at(self, version: int) -> None:
        """Raise `StampError` if a token claims a version newer than `version`, the trainer's."""
        if self.newest is not None and self.newest > version:
            raise StampError(
                f"{self._stamped(self.newest)}, but the trainer is at version {version}: nothing newer can have been "
                "published."
            )

    def record(self, outcome: str, taken_version: int | None, now: float) -> AttemptRecord:
        """The record of the present attempt, which ends now with this `outcome`."""
        rollouts = self.finished_group.rollouts if self.stage in FINISHED else []
        lengths = [len(rollout.token_ids) for rollout in rollouts]
        return AttemptRecord(
            prompt=self.prompt.index,
            attempt=self.attempt,
            outcome=outcome,
            submitted_version=self.submitted_version,
            oldest=self.oldest if rollouts else None,
            newest=self.newest if rollouts else None,
            taken_version=taken_version,
            tokens=sum(lengths),
            lengths=lengths,
            submitted=self.stage_times.get("in the engine"),
            finished=self.stage_times.get("waiting for its reward"),
            scoring=self.stage_times.get("being scored"),
            scored=self.stage_times.get("ready"),
            ended=now,
        )

    def state(self) -> OutstandingState:
        """What another process needs to continue with this prompt. An attempt in the engine is not part of it: it is
        sampled again."""
        return OutstandingState(
            prompt_index=self.prompt.index,
            prompt_ids=list(self.prompt.token_ids),
            submitted_version=self.submitted_version,
            attempt=self.attempt + 1 if self.stage == "to submit" else self.attempt,
            failures=list(self.failures),
            rollouts=list(self.finished_group.rollouts) if self.stage in FINISHED else None,
            score=self.finished_group.score if self.stage == "ready" else None,
            prompt_digest=prompt_digest(self.prompt.example, self.prompt.images),
        )

    def _stamped(self, version: int) -> str:
        return (
            f"The engine stamped a token of prompt {self.prompt.index} (attempt {self.attempt}) with version {version}"
        )


def _version_range(rollouts: list[Rollout]) -> tuple[int | None, int | None]:
    """The oldest and the newest version among the tokens that a policy sampled, `None` if it sampled none."""
    versions = {version for rollout in rollouts for version in rollout.versions}
    if min(versions) < -1:
        raise StampError(f"The engine stamped a token with version {min(versions)}: versions are 0 or more, or -1.")
    versions.discard(-1)
    return (min(versions), max(versions)) if versions else (None, None)
