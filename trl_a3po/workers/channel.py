"""Messages between the engine and its worker over a socket pair: in order, whole, and never blocking by themselves.

Guarantees: `send` returns at once, keeping what the socket does not take yet; `receive` returns only whole messages;
the end of the other side is seen after its last whole message. Each side trusts the other: messages are pickles.
"""

import contextlib
import pickle
import select
import socket
import struct
from collections import deque
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20
POLL_SECONDS = 3600.0


class Channel:
    """One end. Sending and receiving may happen in different threads; two sends at once need a lock around them."""

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self._socket = end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._received: deque[Any] = deque()  # by `receive_one`, for later
        self._ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Queue `message` and send what the socket takes now."""
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outgoing += _LENGTH.pack(len(payload))
        self._outgoing += payload
        self.flush()

    def flush(self) -> bool:
        """Send what the socket takes now; whether everything has gone. A dead receiver counts as gone: `receive`
        is where its end is noticed."""
        while self._outgoing:
            try:
                sent = self._socket.send(memoryview(self._outgoing)[:_CHUNK])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self._outgoing.clear()
                return True
            del self._outgoing[:sent]
        return True

    def drain(self) -> None:
        """Wait until everything has gone, which takes as long as the other side takes to read it."""
        while not self.flush():
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            poller.poll()

    def poll(self, timeout: float) -> bool:
        """Whether there is something to receive, waiting up to `timeout` seconds for it."""
        if self._received:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def receive(self) -> list[Any]:
        """The whole messages that have arrived; `[]` if none has. Raises `EOFError` once the other side has ended and
        everything it sent was returned."""
        while not self._ended:
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except ConnectionResetError:
                chunk = b""
            self._ended = not chunk
            self._incoming += chunk
        messages = list(self._received)
        self._received.clear()
        while len(self._incoming) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                break
            messages.append(pickle.loads(bytes(self._incoming[_LENGTH.size : end])))
            del self._incoming[:end]
        if self._ended and not messages:
            raise EOFError("the other side has ended")
        return messages

    def receive_one(self) -> Any:
        """The next message, waiting for it; any that arrived with it are kept for the next calls. Raises as
        `receive`."""
        while not self._received:
            self.poll(POLL_SECONDS)
            self._received.extend(self.receive())
        return self._received.popleft()

    def shutdown(self) -> None:
        """End both directions; a thread that waits on this end wakes up."""
        with contextlib.suppress(OSError):  # the other side may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
