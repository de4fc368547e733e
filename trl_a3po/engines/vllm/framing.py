"""The body of an HTTP answer out of its bytes, and lines out of a body: many at a time, because a token is a chunk.

Guarantees: no I/O; the result does not depend on where the bytes were cut; a chunk or line without an end is rejected.
"""

import http.client
from collections.abc import Iterable, Iterator

_LARGEST = 1 << 24  # bytes of one chunk or line


def dechunked(received: Iterable[bytes]) -> Iterator[bytes]:
    """The body of an answer sent in chunks (RFC 9112, section 7.1), without the chunk that ends it.

    Raises:
        http.client.HTTPException: the bytes are not chunks.
    """
    rest = b""
    for data in received:
        rest, at, body = rest + data, 0, []
        while (end := rest.find(b"\r\n", at)) >= 0:
            try:
                size = int(rest[at:end].partition(b";")[0], 16)
            except ValueError:
                raise http.client.HTTPException(f"a chunk of the length {rest[at:end][:40]!r}") from None
            if size <= 0 or len(rest) < end + 2 + size + 2:
                break
            body.append(rest[end + 2 : end + 2 + size])
            at = end + 2 + size + 2
        rest = _bounded(rest[at:])
        if body:
            yield b"".join(body)


def lines_of(received: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Whole lines, without their ends and without empty ones."""
    rest = b""
    for data in received:
        *lines, rest = (rest + data).split(b"\n")
        if lines := [line for line in (line.rstrip(b"\r") for line in lines) if line]:
            yield lines
        _bounded(rest)
    if rest:
        yield [rest]


def _bounded(rest: bytes) -> bytes:
    if len(rest) > _LARGEST:
        raise http.client.HTTPException(f"{len(rest)} bytes without an end")
    return rest
