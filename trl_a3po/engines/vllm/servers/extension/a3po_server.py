"""An extension of a vLLM server: it says how many tokens each request of a trainer has, while the server is paused.

    PYTHONPATH=FOLDER_OF_THIS_FILE vllm serve ... --middleware a3po_server.TokenCounts

With this, a trainer knows which tokens of an answer were sampled before its weights changed and which after, and no
answer has to be streamed. Guarantees: what the engine has sampled before the pause is counted, because the counts are
taken after everything that the engine had sent; a request's counts are exact, whether it has not begun, is under way
or is being answered. For a server with one API process. This file imports nothing of the trainer's package, and works
with vLLM 0.22 to 0.31: copy it to other machines.
"""

import asyncio
import json
import re
from collections import deque
from typing import Any

PATH = "/a3po/token_counts"
TIMEOUT = 20.0  # seconds for what the engine has sent to be processed
_NAME = re.compile(r"a3po-[0-9a-f]+-\d+")  # of a trainer's request, within all that vLLM names after it


class TokenCounts:
    """Answers `PATH` with `{"open": {request: {"begun": bool, "tokens": {sequence: count}}}, "answered": [request]}`.
    Of a request that has begun, sequences without a count are finished; of another one, they have no token yet."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._client: Any = None
        self._open: set[str] = set()
        self._begun: set[str] = set()
        self._answered: deque[str] = deque(maxlen=10_000)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._watch(scope["app"].state.engine_client)
        if scope["path"].endswith(PATH):
            await _answer(send, await self._counts())
            return
        found = _NAME.fullmatch(dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1"))
        if found is None:
            await self._app(scope, receive, send)
            return
        self._open.add(found[0])
        try:
            await self._app(scope, receive, send)
        finally:
            self._open.discard(found[0])
            self._begun.discard(found[0])
            self._answered.append(found[0])

    def _watch(self, client: Any) -> None:
        """Note every request that the engine has been given, once all of its sequences are known to the front end."""
        if self._client is client:
            return
        self._client, add_request = client, client.add_request

        async def add(request_id: Any, *arguments: Any, **options: Any) -> Any:
            added = await add_request(request_id, *arguments, **options)
            if isinstance(request_id, str) and (found := _NAME.search(request_id)):
                self._begun.add(found[0])
            return added

        client.add_request = add

    async def _counts(self) -> dict[str, Any]:
        await asyncio.wait_for(_caught_up(self._client), TIMEOUT)
        counts: dict[str, Any] = {name: {"begun": name in self._begun, "tokens": {}} for name in self._open}
        for state in self._client.output_processor.request_states.values():
            found = _NAME.search(state.request_id)
            if found is not None and found[0] in counts:
                counts[found[0]]["tokens"][state.request_index] = state.detokenizer.num_output_tokens()
        return {"open": counts, "answered": list(self._answered)}


async def _caught_up(client: Any) -> None:
    """Return when everything has been processed that the engine had sent before."""
    from vllm.v1.engine import EngineCoreOutputs

    client._run_output_handler()
    reached = asyncio.Event()
    client.engine_core.outputs_queue.put_nowait(EngineCoreOutputs(outputs=_Marker(reached)))
    await reached.wait()


class _Marker(list[Any]):
    """No outputs, which say when they are looked at: outputs are processed in the order in which they came."""

    def __init__(self, reached: asyncio.Event) -> None:
        super().__init__()
        self._reached = reached

    def __len__(self) -> int:
        self._reached.set()
        return 0


async def _answer(send: Any, payload: Any) -> None:
    body = json.dumps(payload).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
