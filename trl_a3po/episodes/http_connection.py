"""One HTTP/1.1 connection of a server: requests in, answers out. The bytes are parsed by `h11`.

Guarantees: whatever arrives, a request is answered, or the connection is closed; a request that is larger than
`MOST_BYTES`, or takes longer than `READ_TIMEOUT` to arrive, is not kept; one request at a time is being answered, and
its answer is cancelled when the client leaves.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import h11

MOST_BYTES = 64 << 20  # of the body of one request
MOST_HEADER_BYTES = 64 << 10
READ_TIMEOUT = 60.0  # seconds for one request to arrive


@dataclass(frozen=True, slots=True)
class HTTPRequest:
    """A request. The names of its headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HTTPAnswer:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class HTTPConnection(asyncio.Protocol):
    """
    Args:
        answer: answers a request. It is cancelled when the client leaves.
        fault: the answer to a request that cannot be read, from its status and a sentence.
        ended: called when the connection has been closed.
    """

    def __init__(
        self,
        answer: Callable[[HTTPRequest], Awaitable[HTTPAnswer]],
        fault: Callable[[int, str], HTTPAnswer],
        ended: Callable[["HTTPConnection"], object] = lambda connection: None,
    ):
        self._answer = answer
        self._fault = fault
        self._ended = ended
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADER_BYTES)
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._is_made = self._is_closed = False

    def close(self) -> None:
        """Close the connection at once, or as soon as it has been made."""
        self._is_closed = True
        if self._is_made:
            self._transport.abort()

    # --- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._is_made = cast(asyncio.Transport, transport), True
        if self._is_closed:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._arrived()
        if self._task is not None:
            self._task.cancel()
        self._ended(self)

    def data_received(self, data: bytes) -> None:
        if self._task is not None and len(self._http.trailing_data[0]) > MOST_HEADER_BYTES:
            self.close()  # it sends request after request without reading an answer
            return
        if self._late is None and self._task is None:
            self._late = asyncio.get_running_loop().call_later(READ_TIMEOUT, self.close)
        self._http.receive_data(data)
        self._read()

    def eof_received(self) -> bool:
        return False  # which closes the connection

    # --- one request ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read what has arrived, up to the end of a request."""
        while self._task is None and not self._transport.is_closing():
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                self._refuse(error.error_status_hint, str(error))
                return
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    self._write(h11.InformationalResponse(status_code=100, headers=[]))
                return
            self._take(cast(h11.Event, event))

    def _take(self, event: h11.Event) -> None:
        match event:
            case h11.Request():
                self._head = event
                self._body.clear()
            case h11.Data():
                self._body += event.data
                if len(self._body) > MOST_BYTES:
                    self._refuse(413, f"The body of the request has more than {MOST_BYTES} bytes.")
            case h11.EndOfMessage():
                self._arrived()
                self._task = asyncio.ensure_future(self._answer_request())
            case h11.ConnectionClosed():
                self._transport.close()

    async def _answer_request(self) -> None:
        assert self._head is not None
        head = self._head
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        request = HTTPRequest(head.method.decode(), head.target.decode("latin-1"), headers, bytes(self._body))
        self._body.clear()
        answer = await self._answer(request)
        self._task = None
        self._send(answer)
        if self._http.our_state is h11.MUST_CLOSE:
            self._transport.close()
            return
        self._head = None
        self._http.start_next_cycle()
        self._read()

    def _refuse(self, status: int, why: str) -> None:
        """Answer a request that cannot be read, and close the connection."""
        self._arrived()
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(self._fault(status, why))
        self._transport.close()

    def _send(self, answer: HTTPAnswer) -> None:
        headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body))), *answer.headers]
        self._write(h11.Response(status_code=answer.status, headers=headers))
        if self._head is None or self._head.method != b"HEAD":
            self._write(h11.Data(data=answer.body))
        self._write(h11.EndOfMessage())

    def _write(self, event: h11.Event) -> None:
        self._transport.write(self._http.send(event) or b"")

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
