"""The plain records that move from the prompt stream to the trainer: no tensors, no threads, no model.

Guarantees: a `Rollout`'s three lists are aligned, one entry per generated token; a `Group` is complete (every
rollout of its prompt) or it does not exist.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion as its sampler saw it.

    Args:
        token_ids: generated tokens, the stop token included.
        logps: log-prob of each token under the policy that sampled it (temperature applied, no top-p/top-k
            renormalisation, fp32).
        versions: policy version whose weights produced the logits each token was sampled from; -1 where no policy
            sampled it.
        finish_reason: `"stop"` when a stop token ended it, `"length"` when `max_new_tokens` did.

    Raises:
        ValueError: the lists differ in length or are empty, or a log-prob is NaN, infinite or positive.
    """

    token_ids: list[int]
    logps: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length"] = "stop"

    def __post_init__(self):
        if not len(self.token_ids) == len(self.logps) == len(self.versions):
            raise ValueError(
                f"A rollout's lists must be aligned token by token, but it has {len(self.token_ids)} token ids, "
                f"{len(self.logps)} log-probs and {len(self.versions)} versions: the engine must return all three "
                "for every token it sampled."
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the prompt stream.

    Args:
        index: place in the stream, 0-based, counted over all epochs and never reused.
        example: the dataset row, as the reward functions receive it.
        token_ids: the tokenised prompt.
    """

    index: int
    example: dict[str, Any]
    token_ids: list[int]


@dataclass(slots=True)
class Score:
    """What the reward functions said of one group of G rollouts.

    Args:
        rewards: G rows of one float per reward function; NaN where a function returned `None`.
        extra_columns: what `log_extra` recorded: column -> G values.
        metrics: what `log_metric` recorded, in call order.
        seconds: time the reward functions took.
    """

    rewards: list[list[float]]
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt, finished and scored.

    Args:
        prompt: the prompt they answer.
        rollouts: `num_generations` rollouts.
        score: the rewards, `None` until the reward functions have run.
        submitted_version: the published version when this attempt was submitted: no token is older.
        attempt: 1 for the first attempt at the prompt.
    """

    prompt: Prompt
    rollouts: list[Rollout]
    score: Score | None = None
    submitted_version: int = 0
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Rejection:
    """Returned instead of a `Score` to keep a group from being trained; another prompt takes its place.

    `remedy` is what to do where every group is rejected this way.
    """

    reason: str
    remedy: str = field(default="loosen what rejects them, or choose prompts it keeps", compare=False)
