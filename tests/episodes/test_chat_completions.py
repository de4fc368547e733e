"""OpenAI's chat completions as data: what a request means, and what an answer says."""

import json

import pytest

from trl_a3po.episodes.chat_completions import answer_fields, events, read_messages, read_request, written_message
from trl_a3po.episodes.episode import Turn
from trl_a3po.protocol.engine import SamplingSettings

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def turn(content="", calls=(), reason="stop", **message):
    message = {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **message}
    return Turn([5, 6], [-1.0, -1.0], [0, 0], reason, message)


def request(**fields):
    body = {"model": "any", "messages": [{"role": "user", "content": "q"}], **fields}
    return read_request(json.dumps(body).encode(), SamplingSettings(8))


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
    ],
)
def test_max_completion_tokens_replaces_max_tokens_which_it_has_succeeded(fields, most):
    assert request(**fields).max_new_tokens == most


def test_a_stop_may_be_one_text_or_several():
    assert request(stop="a").stops == ["a"] and request(stop=["a", "b"]).stops == ["a", "b"] and request().stops == []


def test_messages_are_those_that_chat_templates_render():
    calls = [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    given = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "1"},
    ]
    assert read_messages(given, {"call_0": "add"}) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "q?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "name": "add"},
    ]


def test_a_turn_without_calls_has_text_and_one_of_calls_alone_has_none():
    assert written_message(turn(), 0) == {"role": "assistant", "content": ""}
    assert written_message(turn("yes"), 0) == {"role": "assistant", "content": "yes"}
    assert written_message(turn(calls=[CALL]), 0)["content"] is None


def test_the_calls_of_an_episode_are_numbered_through():
    message = written_message(turn(calls=[CALL, CALL]), first_call=3)
    assert [call["id"] for call in message["tool_calls"]] == ["call_3", "call_4"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


@pytest.mark.parametrize(
    ("calls", "reason", "finish"),
    [
        ([], "stop", "stop"),
        ([], "length", "length"),
        ([], "full", "length"),
        ([CALL], "stop", "tool_calls"),
        ([CALL], "length", "length"),
    ],
)
def test_a_turn_that_was_cut_says_so_also_if_it_holds_a_call(calls, reason, finish):
    answer = answer_fields(turn(calls=calls, reason=reason), {}, prompt_tokens=3, number="0-1")
    assert answer["choices"][0]["finish_reason"] == finish
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_ends_with_the_reason_and_with_the_usage_only_if_it_was_asked_for(with_usage):
    answer = answer_fields(turn("yes"), written_message(turn("yes"), 0), prompt_tokens=3, number="0-1")
    lines = events(answer, with_usage).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None, "stop"] and chunks[0]["choices"][0]["delta"]["content"] == "yes"
    assert [chunk["usage"] for chunk in chunks if "usage" in chunk] == ([answer["usage"]] if with_usage else [])
