"""`Episode`: one rollout of several turns, as the function that plays it sees it.

A rollout function plays one episode. It samples from the policy as often as it likes, does anything in between, and
returns a reward:

```python
async def guess(episode: Episode) -> float:
    messages = list(episode.prompt)
    for _ in range(5):
        turn = await episode.sample(messages)
        if "7" in turn.text:
            return 1.0
        messages += [turn.message, {"role": "user", "content": "No. Guess again."}]
    return 0.0
```

Guarantees: the tokens of an episode only grow. What was sampled is never rendered or tokenised again; each sampled
token keeps its log-prob and the version of the policy that sampled it, and every other token of the completion has
version -1, so that it is read by the policy and not trained. A completion has at most `max_completion_length` tokens.

Episodes are played at the same time, all of them in one thread, with one event loop: a rollout function waits with
`await`, and calls what blocks through `asyncio.to_thread`.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from trl_a3po.episodes.image_rules import Message
from trl_a3po.episodes.templates import ChatTemplates
from trl_a3po.protocol.engine import GroupRequest
from trl_a3po.protocol.images import PromptImages, grown
from trl_a3po.protocol.records import EpisodeEnd, EpisodeRecord, Rollout

Reward = float | Mapping[str, float | None] | None


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy said in one turn.

    Args:
        token_ids, logps, versions: the sampled tokens, as in `Rollout`.
        finish_reason: `"stop"` after a stop token; `"length"` if the tokens that were allowed have been sampled;
            `"full"` if the completion had no room for what was added and one token more. Then nothing was added and
            nothing was sampled.
        message: the tokens as an assistant's message, with `tool_calls` where the tokenizer can parse them.
    """

    token_ids: list[int]
    logps: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length", "full"]
    message: Message

    @property
    def text(self) -> str:
        """The content of the message."""
        return str(self.message.get("content") or "")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return list(self.message.get("tool_calls") or ())


def full_turn() -> Turn:
    """A turn for which the completion has no room."""
    return Turn([], [], [], "full", {"role": "assistant", "content": ""})


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """How an episode ended, for rollout functions that return more than a reward.

    Args:
        reward: the reward of the rollout; `None` leaves rewards to `reward_funcs`. With several columns, reward by
            column.
        messages: the completion as reward functions and the table of completions show it; `None` for the messages of
            the episode.
        columns: values of this rollout that reward functions receive by name, as they receive the dataset's columns.
        end: how the episode ended; `None` if it ended by itself, or for lack of room.
    """

    reward: Reward = None
    messages: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    end: EpisodeEnd | None = None


@dataclass(eq=False, slots=True)
class Endpoint:
    """Where an agent reaches the policy, as the arguments of `openai.OpenAI` and `openai.AsyncOpenAI`.

    Args:
        base_url: the URL, which ends in `/v1`.
        api_key: the key of the episode.
    """

    base_url: str
    api_key: str = field(repr=False)


Sampler = Callable[["Episode", GroupRequest], Awaitable[Rollout]]
OpenEndpoint = Callable[["Episode"], AbstractAsyncContextManager[Endpoint]]


class Episode:
    """One rollout that is being played. Rollout functions are given it; they do not make one.

    Attributes:
        row: the dataset row. It is the episode's own and may be changed.
        number: the rollout's number within its group, 0-based.
        prompt: the prompt of the row, text or messages, until the first turn. After it, the prompt that was used.
        prompt_ids: its tokens.
        images: the images that prompt and completion show so far, as the engine is given them; `None` if there are
            none.
        messages: the messages of the completion so far, if the prompt is messages.
        token_ids, logps, versions: the completion so far, as in `Rollout`.
        turns: how often the policy has been sampled from.
        tool_calls, tool_failures, tool_timeouts: counted by whoever calls tools, for the metrics of TRL.
    """

    def __init__(
        self,
        request: GroupRequest,
        number: int,
        *,
        key: int,
        templates: ChatTemplates,
        max_completion_length: int,
        context: int | None,
        sampler: Sampler,
        open_endpoint: OpenEndpoint,
    ):
        assert request.row is not None, "requests of episodes hold their rows"
        self.row = dict(request.row)
        self.number = number
        self.key = key
        self.prompt: Any = templates.shown(self.row, request.images)
        self.prompt_ids = list(request.prompt_ids)
        self.images = request.images
        self.messages: list[Message] = []
        self.token_ids: list[int] = []
        self.logps: list[float] = []
        self.versions: list[int] = []
        self.turns = self.tool_calls = self.tool_failures = self.tool_timeouts = 0
        self.tool_seconds = 0.0
        self.doing, self.doing_since = "beginning", time.monotonic()
        self.waited_for = "nothing"
        self.over = False
        self._request = request
        self._templates = templates
        self._longest = max_completion_length
        self._context = context
        self._sampler = sampler
        self._open_endpoint = open_endpoint
        self._tools: list[Any] = templates.tools
        self._first_turn = self._completion_images = 0
        self._full = self._is_sampling = False
        self._finish: Literal["stop", "length"] = "length"

    @property
    def group(self) -> int:
        """Id of the request that this episode is a part of."""
        return self._request.request_id

    @property
    def tokens_left(self) -> int:
        """How many more tokens the completion can hold, those of tools included."""
        left = self._longest - len(self.token_ids)
        return left if self._context is None else min(left, self._context - len(self.prompt_ids) - len(self.token_ids))

    def begin(
        self,
        prompt: Any,
        prompt_ids: Sequence[int],
        tools: Sequence[Any] = (),
        images: PromptImages | None = None,
    ) -> None:
        """Begin with another prompt than that of the row.

        Args:
            prompt: text or messages.
            prompt_ids: its tokens.
            tools: the tools that it offers, as `apply_chat_template` takes them.
            images: the images that it shows, and what the processor has made of them.

        Raises:
            ValueError: the episode has begun, or the prompt does not fit.
        """
        if self.turns or self.token_ids:
            raise ValueError("The episode has begun: its prompt cannot be changed any more.")
        self.prompt, self.prompt_ids, self._tools, self.images = prompt, list(prompt_ids), list(tools), images
        if self.tokens_left < 1:
            raise ValueError(
                f"The prompt of the episode has {len(self.prompt_ids)} tokens, and the model's context of "
                f"{self._context} leaves no room for an answer: shorten what the environment adds to the prompt."
            )

    def append(self, new: Sequence[int] | Sequence[Message]) -> bool:
        """Add tokens, or messages that are not the policy's, behind what there is. Returns whether they fit; if they
        do not, nothing is added."""
        messages = _messages(new)
        rendered = self._templates.suffix(messages) if messages else self._templates.checked(_token_ids(new))
        return self.append_tokens(rendered.token_ids, messages, rendered.images)

    def append_tokens(
        self, token_ids: Sequence[int], messages: Sequence[Message] = (), images: PromptImages | None = None
    ) -> bool:
        """As `append`, with the tokens, the messages that they are, and the images that they show."""
        length = len(self.token_ids) + len(token_ids)
        if length > self._longest or (self._context is not None and len(self.prompt_ids) + length >= self._context):
            self._full = True
            return False
        if images is not None:
            self.images = grown(self.images, images, len(self.prompt_ids) + len(self.token_ids))
            self._completion_images += len(images.images)
        self.token_ids += token_ids
        self.logps += [0.0] * len(token_ids)
        self.versions += [-1] * len(token_ids)
        self.messages += messages
        return True

    async def sample(
        self,
        context: Sequence[int] | Sequence[Message] | str | None = None,
        *,
        tools: Sequence[Any] | None = None,
        stop: Sequence[int | str] = (),
        max_new_tokens: int | None = None,
    ) -> Turn:
        """Sample the next turn from the policy.

        Args:
            context: all that the policy reads: token ids, or messages, or, in the first turn, a prompt as text. It
                begins with everything so far, and what is new is added first, masked. `None` adds nothing. In the
                first turn, it replaces the prompt of the row.
            tools: the tools that the prompt offers, in the first turn: functions or JSON schemas, as
                `apply_chat_template` takes them.
            stop: tokens that end the turn beside those of the run, by id or by text, which must be one token.
            max_new_tokens: most tokens of this turn.

        Raises:
            ValueError: the context does not begin with what was sampled and added so far.
        """
        if self._is_sampling:
            raise RuntimeError(
                "sample() was called while this episode is sampled from: an episode is one sequence of tokens, so "
                "await each turn. Other episodes are sampled at the same time."
            )
        self._is_sampling = True
        try:
            if not self._added(context, tools) or self.tokens_left < 1:
                self._full = True
                return full_turn()
            return await self._turn(stop, max_new_tokens)
        finally:
            self._is_sampling = False

    def endpoint(self) -> AbstractAsyncContextManager[Endpoint]:
        """An OpenAI-compatible endpoint that samples from this episode, for an agent that is written with the
        `openai` client, or in another process of this machine:

        ```python
        async with episode.endpoint() as endpoint:
            client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
            await agent(client, episode.row["question"])
        ```

        It is open until the block ends. The messages of each request follow the rule of `sample`. If a request was
        refused, or the engine could not answer it, the end of the block raises the reason.
        """
        return self._open_endpoint(self)

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Inside, the episode waits for `what`, such as "tool 'search'". A stall report names it, and the time counts
        as tool time."""
        self.doing, self.doing_since, self.waited_for = what, time.monotonic(), what
        try:
            yield
        finally:
            self.tool_seconds += time.monotonic() - self.doing_since
            self.doing, self.doing_since = "playing", time.monotonic()

    def rollout(self, result: EpisodeResult, rewards: Mapping[str, float | None]) -> Rollout:
        """The finished rollout.

        Raises:
            ValueError: the policy was never sampled from.
        """
        if not self._first_turn:
            raise ValueError(
                "the episode ended before the policy was sampled from: await episode.sample() at least once"
            )
        text = isinstance(self.prompt, str)
        messages = self._templates.text(self.token_ids) if text else list(self.messages)
        full: EpisodeEnd = "length" if self._full or self.tokens_left < 1 else "done"
        images = PromptImages((), {}) if self.images is None else self.images.nothing_added()
        record = EpisodeRecord(
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            messages=messages if result.messages is None else result.messages,
            first_turn=self._first_turn,
            turns=self.turns,
            tool_calls=self.tool_calls,
            tool_failures=self.tool_failures,
            tool_timeouts=self.tool_timeouts,
            tool_seconds=self.tool_seconds,
            end=full if result.end is None else result.end,
            rewards=dict(rewards),
            columns=dict(result.columns),
            key=self.key,
            images=None if self.images is self._request.images else images,
            completion_images=self._completion_images,
        )
        return Rollout(self.token_ids, self.logps, self.versions, self._finish, record)

    def _added(self, context: Any, tools: Sequence[Any] | None) -> bool:
        """Add what is new in `context`. Returns whether it fits."""
        if not self.turns and (context is not None or tools is not None):
            self._begin_with(self.prompt if context is None else context, tools)
            return True
        if context is None:
            return True
        messages = _messages(context)
        known = [*self.prompt, *self.messages] if messages else [*self.prompt_ids, *self.token_ids]
        given = messages or _token_ids(context)
        if [*map(_compared, given[: len(known)])] != [*map(_compared, known)]:
            raise ValueError(
                f"The context of turn {self.turns + 1} does not begin with the {len(known)} "
                f"{'messages' if messages else 'tokens'} of the episode so far: earlier turns cannot be rewritten. "
                "Append to what was sampled, or call episode.append() with what is new and sample() without a context."
            )
        return self.append(given[len(known) :]) if len(given) > len(known) else True

    def _begin_with(self, context: Any, tools: Sequence[Any] | None) -> None:
        offered = self._tools if tools is None else list(tools)
        if isinstance(context, str):
            self.begin(context, self._templates.prompt(context).token_ids, offered)
        elif messages := _messages(context):
            if messages != self.prompt or tools is not None:
                token_ids, images = self._templates.rendered(messages, offered)
                self.begin(messages, token_ids, offered, images)
        else:
            token_ids, images = self._templates.checked(_token_ids(context), self.images)
            self.begin(self.prompt, token_ids, offered, images)

    async def _turn(self, stop: Sequence[int | str], max_new_tokens: int | None) -> Turn:
        first_position, prefix = len(self.token_ids), (*self.prompt_ids, *self.token_ids)
        longest = min(self.tokens_left, self.tokens_left if max_new_tokens is None else max_new_tokens)
        self.doing, self.doing_since, self.waited_for = "sampling", time.monotonic(), "the engine"
        rollout = await self._sampler(
            self,
            GroupRequest(
                request_id=self._request.request_id,
                noise_key=self._request.noise_key,
                prompt_ids=prefix,
                num_rollouts=1,
                first_rollout=self.number,
                first_position=first_position,
                max_new_tokens=longest,
                stop_token_ids=tuple(self._templates.stop_token(one) for one in stop),
                first_episode=self.key,
                images=self.images,
            ),
        )
        self.images = None if self.images is None else self.images.nothing_added()
        self.doing, self.doing_since = "playing", time.monotonic()
        self.turns += 1
        self._first_turn = self._first_turn or first_position + len(rollout.token_ids)
        self._finish = rollout.finish_reason
        self.token_ids += rollout.token_ids
        self.logps += rollout.logps
        self.versions += rollout.versions
        message = self._templates.message(rollout.token_ids, prefix, self._tools)
        if not isinstance(self.prompt, str):
            self.messages.append(message)
        return Turn(rollout.token_ids, rollout.logps, rollout.versions, rollout.finish_reason, message)


RolloutFunction = Callable[[Episode], Awaitable[EpisodeResult | Reward]]
"""Plays an episode and returns its reward, or an `EpisodeResult`."""


def _messages(context: Any) -> list[Message]:
    """The messages that `context` is; empty if it is token ids."""
    return list(context) if len(context) and isinstance(context[0], Mapping) else []


def _token_ids(context: Any) -> list[int]:
    return [int(token) for token in context]


def _compared(part: Any) -> Any:
    """What of a message must stay as it was: everything but what clients add to calls, such as an id."""
    return (part.get("role"), part.get("content") or "") if isinstance(part, Mapping) else part
