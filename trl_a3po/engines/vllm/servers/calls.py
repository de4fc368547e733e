"""Completion calls, each made by a thread of its own.

Guarantees: the end of every call is reported once, with its answer, or with the server's fault, or with the traceback
of an error in this library; a call that is ended returns at once; after `close` nothing is reported any more.
"""

import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from trl_a3po.engines.vllm.servers.http import Call, HttpFault
from trl_a3po.engines.vllm.servers.server import Server
from trl_a3po.engines.vllm.servers.token_chunks import TokenChunk, parse_answer
from trl_a3po.protocol.images import PromptImages

_END_TIMEOUT = 2.0  # seconds for the threads to end, all together


class CallRequest(NamedTuple):
    """A call to make to the server at `url`, which is told `name`, with a limit of `timeout` seconds for all of it.

    Args:
        images: that its prompt shows.
    """

    number: int
    name: str
    url: str
    body: dict[str, Any]
    timeout: float
    images: PromptImages | None = None


class Ended(NamedTuple):
    """The end of a call: what it brought, or the server's fault, or the traceback of an error in this library."""

    number: int
    chunks: list[TokenChunk]
    fault: HttpFault | None = None
    error: str | None = None


class Calls:
    """
    Args:
        on_end: called with each end, by the thread of the call.
    """

    def __init__(self, on_end: Callable[[Ended], None]) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()  # guards all that follows
        self._calls: dict[int, tuple[Call, threading.Thread]] = {}
        self._closed = False

    def make(self, request: CallRequest) -> None:
        call = Server(request.url).completion(request.body, request.timeout, request.name, request.images)
        thread = threading.Thread(target=self._run, args=(request, call), name="a3po-vllm-call", daemon=True)
        with self._lock:
            self._calls[request.number] = call, thread
        thread.start()

    def end(self, number: int) -> None:
        """Have a call end at once, as if its connection had broken."""
        with self._lock:
            found = self._calls.get(number)
        if found is not None:
            found[0].end()

    def close(self) -> None:
        """End all calls. Nothing more of them is reported."""
        with self._lock:
            self._closed = True
            open_calls = list(self._calls.values())
        for call, _ in open_calls:
            call.end()
        for _, thread in open_calls:
            if thread is not threading.current_thread():
                thread.join(_END_TIMEOUT / len(open_calls))

    def _run(self, request: CallRequest, call: Call) -> None:
        try:
            ended = Ended(request.number, parse_answer(call.data(), request.body["n"]))
        except HttpFault as fault:
            ended = Ended(request.number, [], fault)
        except BaseException:
            ended = Ended(request.number, [], None, traceback.format_exc())
        with self._lock:
            del self._calls[request.number]
            if self._closed:
                return
        self._on_end(ended)
