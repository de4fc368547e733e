"""The endpoint of an episode: OpenAI's chat completions, answered by the policy. An agent that knows nothing of
episodes can play one with it.

Guarantees:
- it listens on the loopback interface only, from the first endpoint of a run to the run's end. A key opens one
  episode, as long as its `async with` block lasts, and is compared in constant time;
- the messages of a request follow the rule of `Episode.sample`: they begin with everything so far, which is never
  tokenised again, and what is new is added;
- once a turn has not fit into `max_completion_length`, every further request is answered with an empty message and
  `finish_reason="length"`;
- a request that is refused, or that the engine cannot answer, makes the attempt at the group fail, also if the agent
  catches the error: no reward comes out of a turn that was never sampled.
"""

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from trl_a3po.episodes.chat_completions import (
    ChatRequest,
    Refused,
    answer_fields,
    events,
    read_messages,
    read_request,
    written_message,
)
from trl_a3po.episodes.episode import Endpoint, Episode, full_turn
from trl_a3po.episodes.http_connection import HTTPAnswer, HTTPConnection, HTTPRequest
from trl_a3po.protocol.engine import SamplingSettings

HOST = "127.0.0.1"
PATH = "/v1/chat/completions"
MOST_CONNECTIONS = 4096


@dataclass(eq=False, slots=True)
class _OpenEndpoint(Endpoint):
    """An endpoint that is open."""

    _episode: Episode = field(repr=False)
    _tools: list[dict[str, Any]] = field(default_factory=list, repr=False)
    _names: dict[str, str] = field(default_factory=dict, repr=False)  # of tools, by the id of a call
    _is_full: bool = field(default=False, repr=False)
    _fault: Exception | None = field(default=None, repr=False)
    _connections: set[HTTPConnection] = field(default_factory=set, repr=False)  # that wait for an answer


class Endpoints:
    """The endpoints of a run. They belong to one event loop.

    Args:
        sampling: how the run samples.
    """

    def __init__(self, sampling: SamplingSettings):
        self._sampling = sampling
        self._open: dict[str, _OpenEndpoint] = {}  # by the number at the beginning of the key
        self._listening = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._connections: set[HTTPConnection] = set()

    @asynccontextmanager
    async def open(self, episode: Episode) -> AsyncIterator[Endpoint]:
        """The endpoint of an episode, until the block ends.

        Raises:
            ValueError: a request was refused.
            EngineError: the engine could not answer a request.
        """
        if str(episode.key) in self._open:
            raise RuntimeError("The episode has an open endpoint: pass that one to everything that plays it.")
        port = await self._port()
        endpoint = _OpenEndpoint(f"http://{HOST}:{port}/v1", f"{episode.key}-{secrets.token_urlsafe(32)}", episode)
        self._open[str(episode.key)] = endpoint
        try:
            yield endpoint
        except Exception as error:
            if endpoint._fault is not None:  # which is why the agent failed
                raise endpoint._fault from error
            raise
        finally:
            del self._open[str(episode.key)]
            for connection in list(endpoint._connections):
                connection.close()
        if endpoint._fault is not None:
            raise endpoint._fault

    async def close(self) -> None:
        """Stop listening, and close every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)  # in which the event loop closes them

    async def _port(self) -> int:
        """The port of the server, which is started when it is first asked for."""
        async with self._listening:
            if self._server is None:
                self._server = await asyncio.get_running_loop().create_server(self._connected, HOST, 0)
        return int(self._server.sockets[0].getsockname()[1])

    def _connected(self) -> HTTPConnection:
        connection = HTTPConnection(
            lambda request: self.answer(request, connection), refusal, self._connections.discard
        )
        self._connections.add(connection)
        if len(self._connections) > MOST_CONNECTIONS:
            connection.close()
        return connection

    # --- one request ---------------------------------------------------------------------------------------------

    async def answer(self, request: HTTPRequest, connection: HTTPConnection) -> HTTPAnswer:
        """The answer to a request, also to one that is refused."""
        endpoint = self._endpoint_of(request.headers.get("authorization", ""))
        if endpoint is None:
            return refusal(401, "The key opens no episode that is being played: pass the endpoint's api_key.")
        if request.path.partition("?")[0] != PATH:
            return refusal(404, f"There is nothing at {request.path!r}: the endpoint of an episode answers {PATH}.")
        if request.method != "POST":
            return refusal(405, f"{request.method} is no method of {PATH}: send a POST.")
        endpoint._connections.add(connection)
        try:
            return await self._complete(endpoint, read_request(request.body, self._sampling))
        except ValueError as error:  # `Refused`, and what `Episode.sample` refuses
            endpoint._fault = ValueError(f"a request to the endpoint of the episode was refused: {error}")
            return refusal(400, str(error))
        except Exception as error:  # of the engine, or of a chat template
            endpoint._fault = error
            return refusal(500, str(error))
        finally:
            endpoint._connections.discard(connection)

    def _endpoint_of(self, authorization: str) -> _OpenEndpoint | None:
        key = authorization.removeprefix("Bearer ")
        endpoint = self._open.get(key.partition("-")[0])
        if endpoint is None or not hmac.compare_digest(key.encode(), endpoint.api_key.encode()):
            return None
        return endpoint

    async def _complete(self, endpoint: _OpenEndpoint, request: ChatRequest) -> HTTPAnswer:
        episode = endpoint._episode
        messages = read_messages(request.messages, endpoint._names)
        if episode.turns and request.tools != endpoint._tools:
            raise Refused(
                f"The tools of turn {episode.turns + 1} are not those of turn 1, which stand in the prompt: offer the "
                "same tools in every request of an episode."
            )
        endpoint._tools = request.tools
        if endpoint._is_full:
            turn = full_turn()
        else:
            turn = await episode.sample(
                messages, tools=request.tools, stop=request.stops, max_new_tokens=request.max_new_tokens
            )
        endpoint._is_full = turn.finish_reason == "full"
        message = written_message(turn, first_call=len(endpoint._names))
        endpoint._names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        before = len(episode.prompt_ids) + len(episode.token_ids) - len(turn.token_ids)
        answer = answer_fields(turn, message, before, f"{episode.key}-{episode.turns}")
        if request.stream:
            return HTTPAnswer(200, events(answer, request.stream_options.get("include_usage", False)), EVENT_STREAM)
        return HTTPAnswer(200, json.dumps(answer).encode())


EVENT_STREAM = "text/event-stream"


def refusal(status: int, why: str) -> HTTPAnswer:
    """An answer that says why there is none, as OpenAI's object. Clients do not send the request again."""
    error = {"message": why, "type": "invalid_request_error" if status < 500 else "server_error"}
    return HTTPAnswer(status, json.dumps({"error": error}).encode(), headers=(("x-should-retry", "false"),))
