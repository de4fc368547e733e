"""`ToolRollout`: the rollout function behind TRL's `tools` and `environment_factory`.

Guarantees:
- the tokens, masks, messages, counts and rewards of an episode are those of GRPOTrainer's own loop, with these
  differences: a tool may take at most `tool_timeout` seconds; every call of an environment is made in one thread; the
  method `close` is no tool; an environment whose `reset` or `get_reward` fails makes the episode fail;
- a tool that raises, is unknown or takes too long is told to the policy as `{"error": ...}`, and counted; a call that
  takes too long goes on unnoticed, and its environment is closed after the episode;
- synchronous functions never block the event loop; those of one turn run one after another, in the policy's order, and
  the asynchronous ones after them, at the same time, as in TRL;
- an environment belongs to its episode until its group has been scored. It is then used again; after a failure, it is
  closed.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from trl.trainer.utils import get_callable_name, is_async_callable

from trl_a3po.episodes.calls import Calls
from trl_a3po.episodes.environments import Environment, EnvironmentPool
from trl_a3po.episodes.episode import Episode, EpisodeResult
from trl_a3po.episodes.image_rules import ImageRules, Message, image_parts, plain_text, tool_content
from trl_a3po.episodes.templates import NO_PROMPT, ChatTemplates, RefusedByProcessor
from trl_a3po.protocol.images import is_image
from trl_a3po.protocol.plain_copy import plain_copy
from trl_a3po.workers.remote_object import ProcessEnded, RemoteObjects

Tool = Callable[..., Any]


class ToolRollout:
    """Plays an episode in which the policy calls tools.

    Args:
        tools: functions that every prompt offers.
        templates: renders prompts and the results of tools.
        calls: makes synchronous calls.
        pool: the environments; `None` if there are none.
        environment_tools: the tools of a prompt by the name of its environment.
        several: the row's `environment` names its environment.
        max_iterations: most turns in which tools are called.
        tool_timeout: seconds that one call of a tool or an environment may take; `None` for no limit.
        processes: the processes of environments, which end with the run.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        templates: ChatTemplates,
        calls: Calls,
        *,
        pool: EnvironmentPool | None = None,
        environment_tools: Mapping[str | None, Sequence[Tool]] | None = None,
        several: bool = False,
        max_iterations: int | None = None,
        tool_timeout: float | None = None,
        processes: RemoteObjects | None = None,
    ):
        self._processes = processes
        self._tools = {get_callable_name(tool): tool for tool in tools}
        self._templates = templates
        self._calls = calls
        self._pool = pool
        self._environment_tools = environment_tools
        self._several = several
        self._max_iterations = max_iterations
        self._timeout = tool_timeout
        self._held: dict[int, Environment] = {}  # by the key of the episode

    async def __call__(self, episode: Episode) -> EpisodeResult:
        if self._pool is None:
            return await self._play(episode, None)
        name = episode.row.get("environment") if self._several else None
        with episode.waiting_for(_named("the factory of environment", name)):
            environment = await self._pool.take(name)
        self._held[episode.key] = environment
        await self._reset(episode, environment)
        result = await self._play(episode, environment)
        return EpisodeResult(await self._reward(episode, environment), end=result.end)

    def environments(self, keys: Iterable[int]) -> list[Any] | None:
        """The instances of these episodes, as long as they are held; `None` if there are no environments. From any
        thread."""
        if self._pool is None:
            return None
        held = [self._held.get(key) for key in keys]
        return [environment and environment.instance for environment in held]

    def give_back(self, keys: Iterable[int]) -> None:
        """The group of these episodes has been scored."""
        for environment in self._let_go(keys):
            assert self._pool is not None
            self._pool.give_back(environment)

    def retire(self, keys: Iterable[int]) -> None:
        """The group of these episodes has failed or was cancelled."""
        for environment in self._let_go(keys):
            assert self._pool is not None
            self._pool.retire(environment)

    async def close(self) -> None:
        """Close every environment."""
        if self._pool is not None:
            await self._pool.close()
        if self._processes is not None:
            self._processes.end()
        self._calls.close()

    def _let_go(self, keys: Iterable[int]) -> list[Environment]:
        return [self._held.pop(key) for key in keys if key in self._held]

    # --- an episode ----------------------------------------------------------------------------------------------

    async def _reset(self, episode: Episode, environment: Environment) -> None:
        """Reset the environment, and begin with the prompt that this gives."""
        row = {key: value for key, value in episode.row.items() if not (self._several and key == "environment")}
        reset = environment.instance.reset
        with episode.waiting_for(_named("reset() of environment", environment.name)):
            observation = await self._call(partial(reset, **plain_copy(row)), reset, environment)
        tools = (self._environment_tools or {}).get(environment.name, ())
        if observation is None and "prompt" in episode.row:
            episode.begin(episode.prompt, episode.prompt_ids, tools, episode.images)
            return
        # Added before the images of the row's columns are put in their places, as TRL does.
        observed = _observed(episode.row.get("prompt", NO_PROMPT), observation, self._templates.image_rules)
        prompt, (token_ids, images) = self._templates.row({**episode.row, "prompt": observed}, environment.name)
        episode.begin(prompt, token_ids, tools, images)

    async def _play(self, episode: Episode, environment: Environment | None) -> EpisodeResult:
        tools = self._tools | (environment.tools() if environment else {})
        turn = await episode.sample()
        iterations = 0
        while turn.tool_calls:
            if iterations == self._max_iterations:
                return EpisodeResult(end="iteration limit")
            results = await self._call_tools(episode, turn.tool_calls, tools, environment)
            messages = [{"role": "tool", "name": name, "content": content} for name, content in results]
            if not self._append(episode, messages):
                return EpisodeResult(end="overlong tool result")
            turn = await episode.sample()
            iterations += 1
        return EpisodeResult()

    def _append(self, episode: Episode, messages: list[Message]) -> bool:
        """Add the results of tools to the episode. Returns whether they fit. Those whose images the processor refuses
        become failures of their tools."""
        texts = [message["content"] for message in messages if isinstance(message["content"], str)]
        if self._templates.is_longer(texts, episode.tokens_left):  # before hours are spent on its tokens
            return False
        try:
            token_ids, images = self._templates.suffix(messages)
        except RefusedByProcessor as refusal:
            with_images = [message for message in messages if image_parts([message])]
            if not with_images:
                raise
            refused = [message for message in with_images if self._is_refused(message, messages)]
            for message in refused or with_images:
                episode.tool_failures += 1
                message["content"] = self._error(refusal)
            token_ids, images = self._templates.suffix(messages)
        return episode.append_tokens(token_ids, messages, images)

    def _is_refused(self, message: Message, messages: list[Message]) -> bool:
        """Whether the processor refuses the images of `message`, without those of the others."""
        alone = [one if one is message or not image_parts([one]) else {**one, "content": ""} for one in messages]
        try:
            self._templates.suffix(alone)
        except RefusedByProcessor:
            return True
        return False

    async def _call_tools(
        self,
        episode: Episode,
        calls: Sequence[Mapping[str, Any]],
        tools: Mapping[str, Tool],
        environment: Environment | None,
    ) -> list[tuple[str, Any]]:
        """Names and contents of the results of the calls of one turn, in TRL's order: synchronous calls and calls that
        cannot be made first."""
        results, waiting = [], []
        for call in calls:
            episode.tool_calls += 1
            name, tool, arguments = _function_of(call, tools)
            if tool is not None and is_async_callable(tool):
                waiting.append(self._result(episode, name, tool, arguments, environment))
            else:
                results.append(await self._result(episode, name, tool, arguments, environment))
        return [*results, *(await asyncio.gather(*waiting))]

    async def _result(
        self, episode: Episode, name: str, tool: Tool | None, arguments: Any, environment: Environment | None
    ) -> tuple[str, Any]:
        """The name and the content of the result of one call. `arguments` says why there is no `tool`, if there is
        none."""
        own = environment if environment and getattr(tool, "__self__", None) is environment.instance else None
        try:
            if tool is None:
                raise ValueError(arguments)
            with episode.waiting_for(f"tool {name!r}"):
                result = await self._call(lambda: tool(**arguments), tool, own)
            return name, tool_content(result, self._templates.image_rules)
        except ProcessEnded as error:
            raise EnvironmentEnded(f"tool {name!r} of an environment: {error}") from error
        except Exception as error:
            episode.tool_failures += 1
            episode.tool_timeouts += isinstance(error, ToolTimeout)
            return name, self._error(error)
        except (SystemExit, KeyboardInterrupt) as error:  # out of an asynchronous tool, it would end the event loop
            raise RuntimeError(f"tool {name!r} raised {error!r}") from error

    def _error(self, error: Exception) -> str:
        """What the policy is told of a call that failed."""
        return plain_text(str({"error": str(error)}), self._templates.image_rules)

    async def _reward(self, episode: Episode, environment: Environment) -> dict[str, float | None]:
        """The reward of the environment, by the name of its column."""
        get_reward = environment.method("get_reward")
        if get_reward is None:
            return {}
        with episode.waiting_for(_named("get_reward() of environment", environment.name)):
            reward = await self._call(get_reward, get_reward, environment)
        return {type(environment.instance).__name__: None if reward is None else float(reward)}

    async def _call(self, call: Callable[[], Any], function: Tool, environment: Environment | None) -> Any:
        """What `call`, a call of `function`, returns.

        Raises:
            ToolTimeout: it took too long.
        """
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                if is_async_callable(function):
                    return await call()
                result = await self._calls.call(call, None if environment is None else environment.thread)
                return await result if inspect.isawaitable(result) else result
        except TimeoutError:
            if not limit.expired():
                raise
            if environment is not None:
                environment.abandon_thread()
            raise ToolTimeout(f"no answer within tool_timeout={self._timeout:g} s") from None


class EnvironmentEnded(Exception):
    """The process of an environment has ended in the middle of an episode."""


class ToolTimeout(Exception):
    """A call took longer than `tool_timeout`."""


def _function_of(call: Mapping[str, Any], tools: Mapping[str, Tool]) -> tuple[str, Tool | None, Any]:
    """The name of the tool of a call, the tool, and its arguments; why it cannot be called instead of them if there is
    no tool."""
    if call["type"] != "function":
        return call.get("name", "unknown"), None, f"Unsupported tool call type: {call['type']}"
    name = call["function"]["name"]
    if name not in tools:
        return name, None, f"Tool {name} not found."
    return name, tools[name], call["function"]["arguments"]


def _observed(prompt: Any, observation: Any, rules: ImageRules | None) -> Any:
    """The prompt with what `reset` returned behind its last message, as TRL adds it."""
    if observation is None:
        return prompt
    if not isinstance(observation, (str, list)) and not is_image(observation):
        raise TypeError(
            f"reset() returned {type(observation).__name__}: it must return a string, content blocks, an image or None"
        )
    last, observation = prompt[-1], tool_content(observation, rules)
    content = last["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**last, "content": content + observation}]


def _named(what: str, environment: str | None) -> str:
    return what.removesuffix(" of environment") if environment is None else f"{what} {environment!r}"
