"""The plain records that move from the prompt stream to the trainer: no threads, no model, and no
tensors but those of images.

Guarantees: the three lists of a `Rollout` are aligned, with one entry per generated token; a `Group` holds every
rollout of its prompt; a token has version -1 exactly where no policy sampled it, and such a token has log-prob 0.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from trl_a3po.protocol.images import PromptImages

EpisodeEnd = Literal["done", "length", "overlong tool result", "iteration limit"]
"""How an episode ended: by itself; with `max_completion_length` tokens; because the result of a tool did not fit into
them; or at `max_tool_calling_iterations`."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """What a rollout of several turns is beside its tokens.

    Args:
        prompt: the prompt as reward functions receive it, text or messages. An environment may have added to it.
        prompt_ids: its tokens.
        messages: the completion as reward functions receive it: text, or the messages of all turns.
        first_turn: how many tokens of the completion belong to the first turn.
        turns: how often the policy was sampled from.
        tool_calls, tool_failures: how many tools were called, and how many of the calls failed.
        tool_timeouts: how many of the calls that failed took longer than `tool_timeout`.
        tool_seconds: time in which the policy waited for tools and for the environment.
        end: how the episode ended.
        rewards: reward by the name of its column, for rewards that the episode itself gives; `None` is no reward.
        columns: values of this rollout that reward functions receive by name, beside the columns of the dataset.
        key: number of the episode within its run.
        images: the `PromptImages` of the prompt and of the completion, where they are not those of the row's prompt;
            `None` where they are. In the records of a checkpoint, places in its list of images.
        completion_images: how many of these the completion shows.
    """

    prompt: Any
    prompt_ids: list[int]
    messages: Any
    first_turn: int
    turns: int = 1
    tool_calls: int = 0
    tool_failures: int = 0
    tool_timeouts: int = 0
    tool_seconds: float = 0.0
    end: EpisodeEnd = "done"
    rewards: dict[str, float | None] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    key: int = -1
    images: Any = None
    completion_images: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of T tokens, as the engine sampled it, or of several turns, with the tokens of tools in between.

    Args:
        token_ids: the T tokens, including stop tokens.
        logps: log-prob of each token under the policy that sampled it (temperature applied, no top-p/top-k
            renormalisation, fp32).
        versions: version of the policy whose weights produced the logits that each token was sampled from; -1 for a
            token that no policy sampled, which has log-prob 0. Such tokens are read by the policy and not trained.
        finish_reason: `"stop"` if a stop token ended the completion, `"length"` if `max_new_tokens` did; of the last
            turn, if there are several.
        episode: what the episode was, if the completion may have several turns; an engine leaves it out.

    Raises:
        ValueError: the lists differ in length, no token was sampled, a token id is negative, a log-prob is NaN,
            infinite or positive, or the log-prob of a token that no policy sampled is not 0.
    """

    token_ids: list[int]
    logps: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length"] = "stop"
    episode: EpisodeRecord | None = None

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logps) == len(self.versions):
            raise ValueError(
                f"The lists of a rollout must be aligned token by token, but this one has {len(self.token_ids)} token "
                f"ids, {len(self.logps)} log-probs and {len(self.versions)} versions: the engine must return all "
                "three for every token that it samples."
            )
        if not self.token_ids:
            raise ValueError("A rollout must hold at least one token: the engine returned an empty completion.")
        if min(self.token_ids) < 0:
            raise ValueError(f"A rollout holds the token id {min(self.token_ids)}: token ids are 0 or more.")
        for position, logp in enumerate(self.logps):
            if not math.isfinite(logp) or logp > 1e-4:
                raise ValueError(
                    f"The log-prob of completion token {position} is {logp}: a sampled token has a finite log-prob "
                    "that is not positive. The engine's logits overflowed or its weights hold NaN."
                )
        if -1 in self.versions:
            self._check_masked()

    @property
    def sampled_versions(self) -> list[int]:
        """The versions of the tokens that a policy sampled."""
        return [version for version in self.versions if version >= 0]

    def _check_masked(self) -> None:
        if not self.sampled_versions:
            raise ValueError("A rollout holds no sampled token (every version is -1): there is nothing to train on.")
        for position, (logp, version) in enumerate(zip(self.logps, self.versions, strict=True)):
            if version == -1 and logp != 0.0:
                raise ValueError(
                    f"Completion token {position} has version -1, which means that no policy sampled it, and the "
                    f"log-prob {logp}: it must be 0."
                )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the prompt stream.

    Args:
        index: place in the prompt stream, 0-based, counted over all epochs and never reused.
        example: the dataset row, as the reward functions receive it.
        token_ids: the tokens of the prompt.
        images: its images; `None` if it has none.
        messages: the prompt as the reward functions receive it where the row has a column of images: with the images
            in the messages. `None` if they receive that of `example`.
    """

    index: int
    example: dict[str, Any]
    token_ids: list[int]
    images: PromptImages | None = None
    messages: list[dict[str, Any]] | None = None

    @property
    def shown(self) -> str | list[dict[str, Any]]:
        """The prompt as the reward functions receive it."""
        prompt: str | list[dict[str, Any]] = self.example["prompt"]
        return prompt if self.messages is None else self.messages


@dataclass(slots=True)
class Score:
    """The rewards of one group of G rollouts.

    Args:
        rewards: G rows with one float per reward function; NaN where a function returned `None`.
        extra_columns: column -> G values, as recorded by `log_extra`.
        metrics: names and values, as recorded by `log_metric`, in the order of the calls.
        seconds: time that the reward functions took.
    """

    rewards: list[list[float]]
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class Group:
    """The finished rollouts of one prompt.

    Args:
        prompt: the prompt.
        rollouts: its `num_generations` rollouts.
        score: their rewards, `None` until the reward functions have run.
        submitted_version: the published version when this attempt was submitted. No token is older.
        attempt: 1 for the first attempt at the prompt.
    """

    prompt: Prompt
    rollouts: list[Rollout]
    score: Score | None = None
    submitted_version: int = 0
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Rejection:
    """Returned instead of a `Score` to keep a group from being trained on. Another prompt's group takes its place.

    Args:
        reason: why the group is rejected. Outcomes are counted by reason, so use the same text for the same reason.
        remedy: what to do if every group is rejected for this reason; it is part of the error message then.
    """

    reason: str
    remedy: str = field(default="loosen the rule that rejects them, or choose prompts that it accepts", compare=False)
