"""HTTP calls with a timeout. A call sends JSON and gets an answer.

Guarantees: a call ends within its timeout whatever the server does, even if the server sends a byte now and then; time
in which this process is stopped does not count; a call can be ended from another thread; every failure is one of the
four kinds of `HttpFault`. A call is one connection to the server itself: proxies set in the environment are ignored.
"""

import contextlib
import http.client
import io
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from trl_a3po.workers.running_clock import TICK, RunningClock

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CONNECT_TIMEOUT = 5.0
_SHOWN = 400  # characters of an answer in an error
_MOST = 1 << 16  # bytes read at a time

Result = TypeVar("Result")


class HttpFault(Exception):
    """A call failed. The message is one sentence."""


class ConnectionFault(HttpFault):
    """The server could not be reached, or the connection broke: it may be gone."""


class TimeoutFault(HttpFault):
    """The answer was not complete within the timeout."""


class StatusFault(HttpFault):
    """The server refused, or failed."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type["StatusFault"], tuple[str, int]]:
        return StatusFault, (str(self), self.status)


class AnswerFault(HttpFault):
    """The server answered with something other than what was asked for."""


class Call:
    """One request to `base_url`, made when its answer is read; read it once.

    Args:
        base_url: such as "http://localhost:8000", with or without a path below which the server answers.
        path: of the request, with its query.
        body: sent as JSON; `None` sends none.
        packed: makes the content type and the parts of another body, in the thread that reads the answer.
        timeout: seconds for all of it.
        name: of the request, which the server is told.
        clock: of the timeout; `None` stands for one that stands still while this process is stopped.
    """

    def __init__(
        self,
        base_url: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        packed: Callable[[], tuple[str, Sequence[bytes]]] | None = None,
        timeout: float,
        name: str | None = None,
        clock: Callable[[], float] | None = None,
    ):
        self._clock = clock
        self._name = name
        self._base_url = base_url
        self._method = method
        self._path = path
        data = [] if body is None else [json.dumps(body).encode()]
        self._packed = packed or (lambda: ("application/json", data))
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._ended = False

    def data(self) -> bytes:
        """The whole answer."""
        with self._answer() as response:
            return response.read()

    def text(self) -> str:
        return self.data().decode(errors="replace")

    def end(self) -> None:
        """Break the connection; the reader gets a `ConnectionFault`. From any thread, idempotent."""
        self._ended = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def named(self) -> str:
        """Where it goes, for a person."""
        return f"{self._base_url}{self._path.partition('?')[0]}"

    @contextlib.contextmanager
    def _answer(self) -> Iterator[http.client.HTTPResponse]:
        clock = RunningClock() if self._clock is None else self._clock
        deadline = clock() + self._timeout
        kind, parts = self._packed()
        connection, below = _connection(self._base_url, min(CONNECT_TIMEOUT, self._timeout))
        try:
            connection.connect()
            self._socket = connection.sock
            if self._ended:
                raise ConnectionFault(f"The call of {self.named} was ended.")
            connection.sock = _DeadlineSocket(connection.sock, deadline, clock)
            headers = {"Connection": "close", "Content-Type": kind, "Content-Length": str(sum(map(len, parts)))}
            if self._name is not None:
                headers["X-Request-Id"] = self._name
            if key := os.environ.get("VLLM_API_KEY"):
                headers["Authorization"] = f"Bearer {key}"
            connection.request(self._method, f"{below}{self._path}", parts or None, headers)
            response = connection.getresponse()
            if response.status != 200:
                shown = shown_of(response.read(_MOST).decode(errors="replace"))
                raise StatusFault(f"{self.named} answered {response.status}{shown}.", response.status)
            yield response
        except TimeoutError as error:
            if self._socket is None and self._timeout > CONNECT_TIMEOUT:
                raise ConnectionFault(f"{self.named} could not be reached within {CONNECT_TIMEOUT:g} s.") from error
            raise TimeoutFault(f"{self.named} did not answer within {self._timeout:g} s.") from error
        except http.client.IncompleteRead as error:
            raise ConnectionFault(f"{self.named} broke the connection within its answer.") from error
        except (OSError, http.client.RemoteDisconnected) as error:
            raise ConnectionFault(f"{self.named} could not be reached: {error or type(error).__name__}.") from error
        except (http.client.HTTPException, ValueError) as error:
            raise AnswerFault(f"{self.named} did not answer in HTTP: {error!r}.") from error
        finally:
            connection.close()
            if self._socket is not None:
                self._socket.close()


def _connection(base_url: str, timeout: float) -> tuple[http.client.HTTPConnection, str]:
    """A connection to be made, and the path below which the server answers."""
    url = urlsplit(base_url)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "", url.port, timeout=timeout), url.path.rstrip("/")


def fetch_json(base_url: str, method: str, path: str, body: Any = None, *, timeout: float) -> Any:
    """The answer of one call, decoded; `None` when it is empty."""
    call = Call(base_url, method, path, body, timeout=timeout)
    return decode_json(call.text(), call.named)


def decode_json(text: str, named: str = "A server") -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise AnswerFault(f"{named} did not answer in JSON, but{shown_of(text)}.") from error


def server_url(url: str) -> str:
    """`url` without what is often copied along: a slash at its end, and the /v1 that clients of OpenAI's API want."""
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def shown_of(answer: str) -> str:
    """The beginning of an answer, for the end of a sentence; a web page is not shown."""
    if not (words := " ".join(answer.split())):
        return ""
    return " with a web page" if words.startswith("<") else f": {words[:_SHOWN].removesuffix('.')}"


class _DeadlineSocket:
    """What `http.client` uses of a socket, each wait cut at a deadline for all of them."""

    def __init__(self, sock: socket.socket, deadline: float, clock: Callable[[], float]):
        self._socket = sock
        self._deadline = deadline
        self._clock = clock

    def sendall(self, data: bytes) -> None:
        sent = 0
        while sent < len(data):
            sent += self._until_deadline(self._socket.send, memoryview(data)[sent:])

    def makefile(self, mode: str) -> "io.BufferedReader[_Reader]":
        self._file = io.BufferedReader(_Reader(self), _MOST)
        return self._file

    def receive_into(self, buffer: "WriteableBuffer") -> int:
        return self._until_deadline(self._socket.recv_into, buffer)

    def close(self) -> None:
        """Nothing: `http.client` is done with it before the answer is read."""

    def _until_deadline(self, wait: "Callable[[WriteableBuffer], Result]", data: "WriteableBuffer") -> Result:
        """What `wait(data)` returns. It waits in pieces, so that the clock is looked at."""
        while (left := self._deadline - self._clock()) > 0:
            self._socket.settimeout(min(TICK, left))
            with contextlib.suppress(TimeoutError):
                return wait(data)
        raise TimeoutError


class _Reader(io.RawIOBase):
    def __init__(self, deadline_socket: _DeadlineSocket):
        self._deadline_socket = deadline_socket

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        return self._deadline_socket.receive_into(buffer)
