"""OpenAI's chat completions: a request as an episode can answer it, and the answer.

Guarantees: a field of a request is followed, or changes nothing about what is sampled, or the request is refused with
the name of the field, its value and what to do instead.

Source: https://platform.openai.com/docs/api-reference/chat/create
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trl_a3po.episodes.episode import Turn
from trl_a3po.episodes.image_rules import Message
from trl_a3po.protocol.engine import SamplingSettings

WITHOUT_EFFECT = {
    "model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"
}  # fmt: skip
"""Fields that say nothing about what is sampled. There is one model."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are followed with these values only."""

OF_THE_RUN = {
    "temperature": "A3POConfig(temperature=...)",
    "top_p": "A3POConfig(top_p=...)",
    "top_k": "A3POConfig(top_k=...)",
    "min_p": "A3POConfig(min_p=...)",
    "repetition_penalty": "A3POConfig(repetition_penalty=...)",
    "seed": "A3POConfig(seed=...)",
}
"""Fields that the run decides, as all its completions are sampled and trained in one way."""

ROLES = ("system", "developer", "user", "assistant", "tool")


class Refused(ValueError):
    """A request that cannot be answered. The message is for the person who wrote the agent."""


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a request that an episode follows."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    stop: str | list[str] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, bool] = {}

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


def read_request(body: bytes, sampling: SamplingSettings) -> ChatRequest:
    """The request that `body` is.

    Args:
        body: the body of the HTTP request.
        sampling: how the run samples.

    Raises:
        Refused: it is none, or asks for something that the run does not do.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        given = {name: value for name, value in fields.items() if value is not None and name not in WITHOUT_EFFECT}
        request = msgspec.convert(
            {name: value for name, value in given.items() if _is_read(name, value, sampling)}, ChatRequest
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"The body is no request for a chat completion: {error}") from None
    if request.max_new_tokens is not None and request.max_new_tokens < 1:
        raise Refused(f"max_tokens={request.max_new_tokens}: a turn has at least one token.")
    if not request.messages:
        raise Refused("messages=[] holds no message, and there is nothing to answer.")
    return request


def read_messages(given: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Message]:
    """Messages as chat templates render them.

    Args:
        given: OpenAI's messages: with text in parts, with the arguments of tool calls as JSON.
        names: the name of the tool by the id of a call.

    Raises:
        Refused: one is no message of text.
    """
    return [_message(each, names, f"messages[{place}]") for place, each in enumerate(given)]


def written_message(turn: Turn, first_call: int) -> Message:
    """The policy's turn as OpenAI's message. Its tool calls are numbered from `first_call`."""
    message: Message = {"role": "assistant", "content": turn.message.get("content") or None}
    if "reasoning_content" in turn.message:
        message["reasoning_content"] = turn.message["reasoning_content"]
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for number, call in enumerate(turn.tool_calls, first_call)
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message


def answer_fields(turn: Turn, message: Message, prompt_tokens: int, number: str) -> dict[str, Any]:
    """The answer to a request, as OpenAI's object."""
    calls, reason = bool(turn.tool_calls), turn.finish_reason
    finish = "length" if reason == "full" else "tool_calls" if calls and reason == "stop" else reason
    sampled = len(turn.token_ids)
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        },
    }


def events(answer: Mapping[str, Any], with_usage: bool) -> bytes:
    """An answer as the server-sent events of a stream: the whole turn as one chunk, its end, and the usage if it is
    asked for."""
    (choice,) = answer["choices"]
    calls = [{"index": place, **call} for place, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    lines = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def _is_read(name: str, value: Any, sampling: SamplingSettings) -> bool:
    """Whether the field is one that `ChatRequest` has, or may have."""
    if name in NEUTRAL:
        if value not in NEUTRAL[name]:
            raise Refused(
                f"{name}={value!r} is not supported by the endpoint of an episode: leave {name} out, or set it to "
                f"{NEUTRAL[name][0]!r}."
            )
        return False
    if name in OF_THE_RUN:
        of_run = getattr(sampling, name)
        if value != of_run:
            raise Refused(
                f"{name}={value!r}, but the run samples and trains every completion with {name}={of_run!r}: leave "
                f"{name} out of the request, or set {OF_THE_RUN[name]}."
            )
        return False
    if name == "chat_template_kwargs":
        raise Refused(
            f"chat_template_kwargs={value!r}: the run decides how prompts are rendered. Set "
            "A3POConfig(chat_template_kwargs=...)."
        )
    return True


def _message(given: Mapping[str, Any], names: Mapping[str, str], where: str) -> Message:
    role = given.get("role")
    if role not in ROLES:
        raise Refused(f"{where}.role={role!r} is none of {', '.join(ROLES)}.")
    message: Message = {"role": "system" if role == "developer" else role, "content": _text(given, where)}
    if role == "tool":
        name = given.get("name") or names.get(str(given.get("tool_call_id")))
        if not isinstance(name, str):
            raise Refused(f"{where}.tool_call_id={given.get('tool_call_id')!r} is the id of no tool call.")
        message["name"] = name
    if given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], where)
    return message


def _text(given: Mapping[str, Any], where: str) -> str:
    class Part(msgspec.Struct, tag_field="type", tag="text"):
        text: str

    try:
        content = msgspec.convert(given.get("content"), str | list[Part] | None)
    except msgspec.ValidationError:
        raise Refused(f"{where}.content is no text, and the policy reads text only.") from None
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as values, as chat templates render them."""

    class Function(msgspec.Struct):
        name: str
        arguments: str

    class Call(msgspec.Struct):
        function: Function

    try:
        calls = msgspec.convert(given, list[Call])
        return [
            {
                "type": "function",
                "function": {"name": call.function.name, "arguments": msgspec.json.decode(call.function.arguments)},
            }
            for call in calls
        ]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Refused(f"{where}.tool_calls are no calls of functions with JSON arguments: {error}") from None
