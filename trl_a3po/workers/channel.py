"""Messages between this process and a worker over a socket pair: whole, in order, and without blocking.

Guarantees: `send` returns at once and keeps what the socket does not take yet; `receive` returns only whole messages;
the end of the other side, or bytes that are not a message, are reported after the last whole message. Each side trusts
the other: messages are pickles. Bytes that are not a message, such as what a library prints into the socket, are not
unpickled.
"""

import contextlib
import pickle
import select
import socket
import struct
import threading
import zlib
from collections import deque
from typing import Any

_HEADER = struct.Struct("!4sQI")  # the magic bytes, then length and checksum of the pickle behind them
_MAGIC = b"a3po"
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 1 << 40  # of one message
POLL_SECONDS = 3600.0


class UnreadableMessage(Exception):
    """The other side sent bytes that are not a message."""


class Channel:
    """One end of a socket pair. Any thread may send; only one thread at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._incoming = bytearray()
        self._received: deque[Any] = deque()  # messages that `receive_one` has left for later calls
        self._ended = False
        self._unreadable = False
        self._sending = threading.Lock()  # guards `_outgoing`
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Queue `message` and send what the socket takes now."""
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._outgoing += _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload))
            self._outgoing += payload
            self._flush()

    def flush(self) -> bool:
        """Send what the socket takes now. Returns whether everything has been sent.

        Messages to a receiver that has ended count as sent: `receive` is where its end is reported.
        """
        with self._sending:
            return self._flush()

    def drain(self) -> None:
        """Wait until everything has been sent, which takes as long as the other side takes to read it."""
        while not self.flush():
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            poller.poll()

    def poll(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for something to receive. Returns whether there is anything."""
        if self._received:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def receive(self) -> list[Any]:
        """The whole messages that have arrived; `[]` if none has.

        Raises:
            EOFError: the other side has ended, and every message it sent has been returned.
            UnreadableMessage: the other side sent bytes that are not a message, and every message before them has
                been returned.
        """
        self._read_socket()
        messages = list(self._received)
        self._received.clear()
        while not self._unreadable and len(self._incoming) >= _HEADER.size:
            magic, length, checksum = _HEADER.unpack_from(self._incoming)
            end = _HEADER.size + length
            is_header = magic == _MAGIC and length <= _MOST_BYTES
            if is_header and len(self._incoming) < end:
                break
            try:
                messages.append(_unpickled(self._incoming[_HEADER.size : end], checksum, is_header))
            except Exception:  # unpickling what the other side cannot load here raises whatever it leads to
                self._unreadable = True
            del self._incoming[:end]
        if messages:
            return messages
        if self._unreadable:
            raise UnreadableMessage("the other side sent bytes that are not a message")
        if self._ended:
            raise EOFError("the other side has ended")
        return messages

    def receive_one(self) -> Any:
        """The next message, waiting for it. Messages that arrive with it are kept for later calls. Raises as `receive`
        does."""
        while not self._received:
            self.poll(POLL_SECONDS)
            self._received.extend(self.receive())
        return self._received.popleft()

    def shutdown(self) -> None:
        """End both directions; a thread that waits on this end wakes up."""
        with contextlib.suppress(OSError):  # the other side may have ended first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _flush(self) -> bool:
        while self._outgoing:
            try:
                sent = self._socket.send(memoryview(self._outgoing)[:_CHUNK_BYTES])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self._outgoing.clear()
                return True
            del self._outgoing[:sent]
        return True

    def _read_socket(self) -> None:
        """Take over the bytes that have arrived."""
        while not self._ended:
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                chunk = b""
            self._ended = not chunk
            self._incoming += chunk


def _unpickled(payload: bytes | bytearray, checksum: int, is_message: bool) -> Any:
    if not is_message or zlib.crc32(payload) != checksum:
        raise pickle.UnpicklingError("these bytes are not a message")
    return pickle.loads(payload)
