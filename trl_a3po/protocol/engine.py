"""What the trainer and the queue ask of an engine, and nothing more.

An engine holds its own copy of the policy and samples groups of completions from it, ahead of training. It knows
nothing of rewards, staleness or losses. Guarantees an engine must give:

- every submitted request ends in exactly one event: `GroupFinished` or `GroupFailed`. Before it, any number of
  `GroupProgress` may say that work goes on;
- a token's version is the version of the weights that produced its logits, stamped where it is sampled;
- a request submitted after `publish(update)` returned is sampled from `update.version` or newer;
- the engine keeps what it needs to recover from the death of its worker: outstanding requests come back as
  `GroupFailed` (the queue decides whether to try again) and the engine samples from the last published version again;
  when it cannot recover any more, `wait` raises `EngineError` with the cause.

`submit`, `wait`, `cancel` and `end_episodes` are called from the queue's thread, `start`, `publish`, `score` and
`close` from the main thread, possibly at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trl_a3po.protocol.images import PromptImages
from trl_a3po.protocol.records import Rollout
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are sampled, the same for every request of a run. Names and meanings are `GRPOConfig`'s.

    `stop_token_ids` end a completion and belong to it; `seed` keys the noise.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    suppress_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    pad_token_id: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Sample `num_rollouts` completions of one prompt, or the next turn of rollouts that have begun.

    Args:
        request_id: unique per attempt, never reused within a run.
        noise_key: with the seed, the rollout's number and the token's position, fixes the noise of every token:
            the same prompt tried again after a failure draws the same noise.
        prompt_ids: the tokens to continue, at least one. For a later turn, these are the prompt and everything that
            follows it so far.
        num_rollouts: completions to sample.
        first_rollout: number of the first of these rollouts within its group; the others follow it.
        first_position: position, in the completion, of the first token to sample: how many tokens of `prompt_ids`
            belong to the completion already. A request with more than 0 is a later turn, which an engine begins
            before the requests that wait with 0.
        max_new_tokens: most tokens to sample; `None` stands for that of the `SamplingSettings`, which is the largest
            value.
        stop_token_ids: tokens that end a completion, and belong to it, beside those of the `SamplingSettings`.
        first_episode: number of the episode that the first of these rollouts belongs to; the others belong to the
            episodes that follow it. Requests for the same episode are its turns, one after another, and an engine may
            keep the keys and values of a turn for the next one, until `Engine.end_episodes`. `None`: no turn follows.
        images: the images that `prompt_ids` show; `None`: there are none.
        row: the dataset row, where the queue's requests are episodes. An engine is never sent one.
    """

    request_id: int
    noise_key: int
    prompt_ids: tuple[int, ...]
    num_rollouts: int
    first_rollout: int = 0
    first_position: int = 0
    max_new_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    first_episode: int | None = None
    images: PromptImages | None = field(default=None, compare=False)
    row: dict[str, Any] | None = field(default=None, compare=False)

    def episode_of(self, number: int) -> int | None:
        """Number of the episode that rollout `number` of the group belongs to."""
        return None if self.first_episode is None else self.first_episode + number - self.first_rollout

    def settings(self, sampling: SamplingSettings) -> SamplingSettings:
        """The settings of this request, where `sampling` are those of the run."""
        if self.max_new_tokens is None and not self.stop_token_ids:
            return sampling
        longest = sampling.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        return replace(
            sampling,
            max_new_tokens=longest,
            min_new_tokens=min(sampling.min_new_tokens, longest),
            stop_token_ids=(*sampling.stop_token_ids, *self.stop_token_ids),
        )


@dataclass(frozen=True, slots=True)
class GroupFinished:
    request_id: int
    rollouts: list[Rollout]


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """The attempt is lost; `reason` is one sentence for a person."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A part of the request is done, such as a turn of an episode. It does not end the request."""

    request_id: int


GroupEnd = GroupFinished | GroupFailed
EngineEvent = GroupEnd | GroupProgress


@dataclass(slots=True)
class EngineStats:
    """Counters since `start`, and what the engine is doing now.

    Args:
        tokens: completion tokens sampled.
        busy_seconds: time spent prefilling or decoding.
        active_rollouts: completions being decoded now.
        waiting_requests: requests received but not started.
        turns_prefilled_again: later turns of which nothing was kept, so that their whole context was read again; 0
            from an engine that does not count them.
        restarts: times a worker was started again after it died.
        publish_seconds: duration of the last publish, as the trainer felt it.
        awaits_publish: nothing is sampled until weights are published once more, also under the version that was
            published last: a worker started again cannot be given them otherwise.
        is_stopped: a worker was stopped (SIGSTOP, a frozen container) and goes on when it is continued.
        trouble: what is wrong with a worker now, such as "its worker (process 7) has said nothing for 31 s", or empty.
        extra: numbers of one engine only, logged under their own names.
    """

    tokens: int = 0
    busy_seconds: float = 0.0
    active_rollouts: int = 0
    waiting_requests: int = 0
    turns_prefilled_again: int = 0
    restarts: int = 0
    publish_seconds: float = 0.0
    awaits_publish: bool = False
    is_stopped: bool = False
    trouble: str = ""
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    def start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        """Build the replica and load `update` (every parameter). Returns when the engine is ready to sample.

        Raises `EngineError` when it cannot, with the worker's own words.
        """

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Hand over requests; returns at once."""

    def wait(self, timeout: float) -> list[EngineEvent]:
        """Events since the last call, waiting up to `timeout` seconds for the first one; `[]` if there was none.

        Raises `EngineError` when the engine is beyond recovery.
        """

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Stop working on these requests; no event follows for them. Unknown ids are ignored."""

    def end_episodes(self, episodes: Sequence[int]) -> None:
        """No turn of these episodes follows: drop what is kept for one. Unknown episodes are ignored."""

    def publish(self, update: WeightUpdate) -> None:
        """Make `update.version` the version sampled from. The tensors are copied before this returns; tokens of
        sequences in flight take the new version at the next decode step. Raises `EngineError`.

        A version may be published again with other weights while nothing is in flight: whatever the engine keeps by
        version, such as a prefix cache, does not outlive a publish."""

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        """Log-probs of known completion tokens, and the version of the weights that gave them, which is the one
        published last: temperature applied, no filter, by a forward that reuses no cache. It may wait for the
        decode step in progress; rollouts in flight go on as they were.

        Raises:
            EngineError: no answer within `timeout` seconds, or the engine is beyond recovery.
            ValueError: no tokens, tokens outside the vocabulary, or more than fit into the model's context.
        """

    def stats(self) -> EngineStats:
        """Cheap, callable from any thread."""

    def close(self) -> None:
        """Stop at once and free everything; idempotent, bounded, also after an error."""
