"""The endpoint of an episode: an agent that knows only OpenAI's chat completions plays one."""

import asyncio
import contextlib
import http.client
import json
import socket

import openai
import pytest

from tests.episodes.chat import TOKENIZER, call, results_in, said, tokens
from tests.episodes.playing import ScriptedEngine, group, played, rollouts_of
from tests.workers.processes import until
from trl_a3po.episodes import endpoint as endpoints
from trl_a3po.protocol.engine import GroupFailed, SamplingSettings

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def client_of(endpoint):
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)


async def adding_agent(client, question, **options):
    """An agent as people write them: it calls tools until there is an answer."""
    messages = [{"role": "user", "content": question}]
    for _ in range(8):
        answer = await client.chat.completions.create(model="any", messages=messages, tools=[ADD], **options)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if answer.choices[0].finish_reason != "tool_calls":
            return messages
        for each in message.tool_calls:
            arguments = json.loads(each.function.arguments)
            content = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": each.id, "content": content})
    raise AssertionError("it went on calling tools")


def adds_twice(prompt_ids, number):
    turn = results_in(prompt_ids)
    return said(f"I add {number}." + call("add", a=turn, b=number)) if turn < 2 else said(f"done {number}")


def test_an_agent_with_openais_client_plays_an_episode_of_the_sampled_tokens(runner_for):
    transcripts = {}

    async def play(episode):
        async with episode.endpoint() as endpoint, client_of(endpoint) as client:
            transcripts[episode.number] = await adding_agent(client, "Add.")
        return 1.0

    engine = ScriptedEngine(adds_twice)
    for number, rollout in enumerate(rollouts_of(runner_for(play, engine), group(2))):
        turns = [said(f"I add {number}." + call("add", a=turn, b=number)) for turn in range(2)]
        results = [
            tokens(f"\n<|im_start|>user\n<tool_response>\n{turn + number}\n</tool_response><|im_end|>\n"
                   "<|im_start|>assistant\n")
            for turn in range(2)
        ]  # fmt: skip
        last = said(f"done {number}")
        assert rollout.token_ids == [*turns[0], *results[0], *turns[1], *results[1], *last]
        sampled = [token for token, version in zip(rollout.token_ids, rollout.versions, strict=True) if version == 0]
        assert sampled == [*turns[0], *turns[1], *last]
        prompt = TOKENIZER.apply_chat_template(
            [{"role": "user", "content": "Add."}], tools=[ADD], add_generation_prompt=True, return_dict=False
        )
        assert rollout.episode.prompt_ids == prompt and rollout.episode.rewards == {"play": 1.0}
        assert transcripts[number][-1] == {"role": "assistant", "content": f"done {number}"}


def test_a_stream_has_the_whole_turn_and_its_usage(runner_for):
    seen = {}

    async def play(episode):
        async with episode.endpoint() as endpoint, client_of(endpoint) as client:
            stream = await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "q"}], tools=[ADD], stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            seen["chunks"] = [chunk async for chunk in stream]

    runner = runner_for(play, ScriptedEngine(adds_twice))
    (rollout,) = rollouts_of(runner, group(1))
    first, end, usage = seen["chunks"]
    assert first.choices[0].delta.content == "I add 0."
    assert first.choices[0].delta.tool_calls[0].function.name == "add"
    assert end.choices[0].finish_reason == "tool_calls"
    assert usage.usage.completion_tokens == len(rollout.token_ids)
    assert usage.usage.prompt_tokens == len(rollout.episode.prompt_ids)


def test_a_blocking_client_plays_in_a_thread(runner_for):
    def agent(base_url, api_key):
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            messages = [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
            ]
            answer = client.chat.completions.create(
                model="any", messages=messages, max_tokens=2, stop="!", temperature=1.0, n=1
            )
            return answer.choices[0]

    choices = []

    async def play(episode):
        async with episode.endpoint() as endpoint:
            choices.append(await asyncio.to_thread(agent, endpoint.base_url, endpoint.api_key))

    engine = ScriptedEngine(lambda ids, number: tokens("abcd"))
    (rollout,) = rollouts_of(runner_for(play, engine), group(1))
    assert choices[0].finish_reason == "length" and choices[0].message.content == "ab"
    assert engine.requests[0].stop_token_ids == tuple(tokens("!")) and rollout.token_ids == tokens("ab")
    assert rollout.episode.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


def test_an_episode_that_is_full_answers_with_length_from_then_on(runner_for):
    reasons = []

    async def play(episode):
        async with episode.endpoint() as endpoint, client_of(endpoint) as client:
            messages = [{"role": "user", "content": "q"}]
            for room_for in (60, 300, 300):
                answer = await client.chat.completions.create(model="any", messages=messages)
                messages += [answer.choices[0].message.model_dump(exclude_none=True)]
                messages += [{"role": "user", "content": "x" * room_for}]
                reasons.append(answer.choices[0].finish_reason)
            shorter = [*messages[:4], {"role": "user", "content": "x"}]  # which would fit
            answer = await client.chat.completions.create(model="any", messages=shorter)
            reasons.append(answer.choices[0].finish_reason)

    (rollout,) = rollouts_of(runner_for(play, max_completion_length=300), group(1))
    assert reasons == ["stop", "stop", "length", "length"]
    assert rollout.episode.turns == 2 and rollout.episode.end == "length"


# --- what is refused -----------------------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "q"}]
REFUSED = {
    "another temperature": ({"temperature": 0.5}, "temperature=0.5, but the run samples and trains every completion "
                            "with temperature=1.0: leave temperature out of the request, or set A3POConfig("),
    "another top_p": ({"top_p": 0.9}, "top_p=0.9, but the run"),
    "a seed": ({"seed": 7}, "seed=7, but the run"),
    "several choices": ({"n": 2}, "n=2 is not supported"),
    "a forced tool": ({"tool_choice": "required"}, "tool_choice='required' is not supported"),
    "a schema": ({"response_format": {"type": "json_object"}}, "response_format={'type': 'json_object'} is not"),
    "penalties": ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported"),
    "log-probs": ({"logprobs": True}, "logprobs=True is not supported"),
    "an unknown field": ({"extra_body": {"nonsense": 1}}, "unknown field `nonsense`"),
    "template options": ({"extra_body": {"chat_template_kwargs": {}}}, "Set A3POConfig(chat_template_kwargs=...)"),
    "a long stop": ({"stop": ["abc"]}, "stop='abc' is 3 tokens"),
    "no token": ({"max_tokens": 0}, "max_tokens=0: a turn has at least one token"),
    "no message": ({"messages": []}, "messages=[] holds no message"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                  "messages[0].content is no text"),
    "another role": ({"messages": [{"role": "critic", "content": "q"}]}, "messages[0].role='critic' is none of"),
    "a result of no call": ({"messages": [*QUESTION, {"role": "tool", "tool_call_id": "1", "content": "q"}]},
                            "messages[1].tool_call_id='1' is the id of no tool call"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_run_does_not_do_is_refused_and_fails_the_attempt(runner_for, case):
    options, words = REFUSED[case]
    errors = []

    async def play(episode):
        async with episode.endpoint() as endpoint, client_of(endpoint) as client:
            try:
                await client.chat.completions.create(**{"model": "any", "messages": QUESTION, **options})
            except openai.BadRequestError as error:
                errors.append(error.message)
            await client.chat.completions.create(model="any", messages=QUESTION)
        return 0.0  # as an agent would that catches everything

    (event,) = played(runner_for(play), group(1))
    assert words in errors[0]
    assert isinstance(event, GroupFailed) and words in event.reason.replace("\\'", "'")


@pytest.mark.parametrize(
    "second, words",
    [
        ({"messages": [{"role": "user", "content": "other"}]}, "does not begin with the 2 messages"),
        ({"messages": QUESTION, "tools": [ADD]}, "The tools of turn 2 are not those of turn 1"),
    ],
)
def test_the_history_and_the_tools_of_an_episode_stay(runner_for, second, words):
    async def play(episode):
        async with episode.endpoint() as endpoint, client_of(endpoint) as client:
            await client.chat.completions.create(model="any", messages=QUESTION)
            await client.chat.completions.create(model="any", **second)

    (event,) = played(runner_for(play), group(1))
    assert isinstance(event, GroupFailed) and words in event.reason


def test_a_turn_that_the_engine_cannot_sample_fails_the_attempt_also_if_the_agent_goes_on(runner_for):
    statuses = []

    async def play(episode):
        async with episode.endpoint() as endpoint, client_of(endpoint) as client:
            try:
                await client.chat.completions.create(model="any", messages=QUESTION)
            except openai.APIStatusError as error:
                statuses.append(error.status_code)
        return 0.0

    engine = ScriptedEngine(fails=lambda request: "the worker died")
    (event,) = played(runner_for(play, engine), group(1))
    assert isinstance(event, GroupFailed) and "the worker died" in event.reason
    assert statuses == [500] and len(engine.requests) == 1


def test_the_reason_is_the_request_that_was_refused_and_not_what_the_agent_made_of_it(runner_for):
    async def play(episode):
        async with episode.endpoint() as endpoint, client_of(endpoint) as client:
            with contextlib.suppress(openai.BadRequestError):
                await client.chat.completions.create(model="any", messages=QUESTION, n=2)
            raise KeyError("an answer")

    (event,) = played(runner_for(play), group(1))
    assert isinstance(event, GroupFailed) and "n=2 is not supported" in event.reason


def test_a_request_that_waits_when_the_block_ends_is_cancelled_and_the_episode_goes_on(runner_for):
    engine = ScriptedEngine()
    engine.held.set()

    async def play(episode):
        async with contextlib.AsyncExitStack() as clients:
            async with episode.endpoint() as endpoint:
                client = await clients.enter_async_context(client_of(endpoint))
                asks = client.with_options(max_retries=0).chat.completions.create(model="any", messages=QUESTION)
                waiting = asyncio.create_task(asks)
                while not engine.requests:
                    await asyncio.sleep(0.01)
            with pytest.raises(openai.APIConnectionError):
                await asyncio.wait_for(waiting, 60)
        engine.held.clear()
        await episode.sample()

    (rollout,) = rollouts_of(runner_for(play, engine), group(1))
    assert rollout.token_ids == said("yes") and engine.cancelled == [engine.requests[0].request_id]


def test_a_request_whose_client_leaves_is_cancelled_and_may_be_made_again(runner_for):
    engine = ScriptedEngine()
    engine.held.set()

    async def play(episode):
        async with episode.endpoint() as endpoint, client_of(endpoint) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.2, max_retries=0).chat.completions.create(
                    model="any", messages=QUESTION
                )
            while not engine.cancelled:
                await asyncio.sleep(0.01)
            engine.held.clear()
            await client.chat.completions.create(model="any", messages=QUESTION)

    (rollout,) = rollouts_of(runner_for(play, engine), group(1))
    assert rollout.token_ids == said("yes") and engine.cancelled == [engine.requests[0].request_id]


# --- who may ask ---------------------------------------------------------------------------------------------------


def asked(endpoint, method="POST", path="/v1/chat/completions", key=None, body=b"{}"):
    host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request(method, path, body, {"Authorization": f"Bearer {key or endpoint.api_key}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, json.loads(body)["error"]["message"] if body else ""


def test_a_key_opens_its_own_episode_until_its_block_ends(runner_for):
    statuses = {}

    async def play(episode):
        async with episode.endpoint() as endpoint:
            assert endpoint.base_url.startswith("http://127.0.0.1:") and endpoint.api_key not in repr(episode)
            number, _, secret = endpoint.api_key.partition("-")
            for name, key in {
                "other": f"{int(number) + 1}-{secret}",
                "cut": endpoint.api_key[:-1],
                "none": "x",
            }.items():
                statuses[name], _ = await asyncio.to_thread(asked, endpoint, key=key)
            statuses["path"], _ = await asyncio.to_thread(asked, endpoint, path="/v1/models", method="GET")
            statuses["method"], _ = await asyncio.to_thread(asked, endpoint, method="HEAD")
            path = "/v1/chat/completions?version=1"
            statuses["query"], _ = await asyncio.to_thread(asked, endpoint, method="GET", path=path)
        statuses["after"], words = await asyncio.to_thread(asked, endpoint)
        assert "opens no episode" in words
        await episode.sample()

    rollouts_of(runner_for(play), group(1))
    found = {"other": 401, "cut": 401, "none": 401, "path": 404, "method": 405, "query": 405, "after": 401}
    assert statuses == found


def test_more_connections_than_are_allowed_are_closed(runner_for, monkeypatch):
    monkeypatch.setattr(endpoints, "MOST_CONNECTIONS", 1)
    received = []

    def opened(port):
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as second:
            second.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                received.append(second.recv(1))

    async def play(episode):
        async with episode.endpoint() as endpoint:
            await asyncio.to_thread(opened, int(endpoint.base_url.split(":")[2].removesuffix("/v1")))
        await episode.sample()

    assert rollouts_of(runner_for(play), group(1)) and received in ([], [b""])


def test_the_server_closes_with_the_run(runner_for):
    ports = []

    async def play(episode):
        async with episode.endpoint() as endpoint:
            ports.append(int(endpoint.base_url.split(":")[2].removesuffix("/v1")))
            ports.append(socket.create_connection(("127.0.0.1", ports[0])))
            await asyncio.sleep(1000)

    runner = runner_for(play)
    runner.submit([group(1)])
    until(lambda: (runner.wait(0.01), len(ports) == 2)[1])
    runner.close()
    with ports[1] as open_before:
        open_before.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert open_before.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), timeout=5)


def test_what_the_run_samples_with_may_be_said_in_a_request(runner_for):
    async def play(episode):
        async with episode.endpoint() as endpoint, client_of(endpoint) as client:
            await client.chat.completions.create(model="any", messages=QUESTION, temperature=0.7, top_p=0.9, seed=3)

    sampling = SamplingSettings(max_new_tokens=400, temperature=0.7, top_p=0.9, seed=3)
    assert rollouts_of(runner_for(play, sampling=sampling), group(1))
