"""Streams of server-sent events: the same events however their bytes are cut, and bounded ones."""

import http.client
import itertools
import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_a3po.engines.vllm.framing import dechunked
from trl_a3po.engines.vllm.http import AnswerFault, Call, ConnectionFault
from trl_a3po.engines.vllm.token_chunks import parse_events


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_chunks_are_the_body_however_they_arrive(chunks, places):
    sent = b"".join(map(chunk, chunks)) + b"0\r\n\r\n"
    assert b"".join(dechunked(cut(sent, places))) == b"".join(chunks)


def test_chunks_may_have_extensions_and_must_have_lengths():
    assert list(dechunked([b"3;name=value\r\nabc\r\n0\r\n\r\n"])) == [b"abc"]
    with pytest.raises(http.client.HTTPException, match="length b'zz'"):
        list(dechunked([b"zz\r\nabc\r\n"]))


def test_a_chunk_without_an_end_is_not_kept_for_ever():
    with pytest.raises(http.client.HTTPException, match="without an end"):
        list(dechunked([b"ffffffff\r\n"] + [bytes(1 << 20)] * 20))


class Stream:
    """What a `Call` reads, in `found`, where a server sends parts and closes."""

    def __init__(self):
        self.found: list[bytes] = []

    def read(self, *parts: bytes, chunked: bool = True) -> list[bytes]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=self._serve, args=(listener, parts, chunked))
            thread.start()
            try:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                for events in Call(url, "GET", "/stream", timeout=5).events():
                    self.found += events
            finally:
                thread.join()
        return self.found

    @staticmethod
    def _serve(listener: socket.socket, parts: tuple[bytes, ...], chunked: bool) -> None:
        caller, _ = listener.accept()
        with caller:
            caller.recv(65536)
            coding = b"Transfer-Encoding: Chunked\r\n" if chunked else b""
            caller.sendall(b"HTTP/1.1 200 OK\r\n" + coding + b"\r\n")
            for part in parts:
                caller.sendall(chunk(part) if chunked else part)


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.mark.parametrize("chunked", [True, False])
def test_events_end_with_done(stream, chunked):
    parts = b"data: 1\n\nda", b"ta: 2\r\n\r\n: still here\n\n", b"data: 3\n\n", b"data: [DONE]\n\n"
    assert stream.read(*parts, chunked=chunked) == [b"1", b"2", b"3"]


def test_events_before_a_broken_one_are_handed_out_first(stream):
    with pytest.raises(AnswerFault, match="not send an event of a stream: junk"):
        stream.read(b"data: 1\n\ndata: 2\n\njunk\n\ndata: 3\n\n")
    assert stream.found == [b"1", b"2"]


def test_a_stream_that_ends_early_is_a_broken_connection(stream):
    with pytest.raises(ConnectionFault, match="before it was complete"):
        stream.read(b"data: 1\n\n")
    assert stream.found == [b"1"]


def event(token: int, logp: float = -1.0, index: int = 0, **changes) -> bytes:
    choice = {"index": index, "token_ids": [token], "logprobs": {"token_logprobs": [logp]}, "finish_reason": None}
    return json.dumps({"choices": [choice | changes], "usage": None}).encode()


def test_tokens_of_events_up_to_the_first_that_is_none():
    pieces, fault = parse_events([event(3), event(4, index=1), b"{", event(5)], 2)
    assert [(piece.index, piece.token_ids) for piece in pieces] == [(0, [3]), (1, [4])]
    assert "not a completion" in str(fault)


@pytest.mark.parametrize(
    "wrong",
    [
        event(-1),
        event(3, logp=0.5),
        event(3, logp=float("nan")),
        event(3, logp=float("-inf")),
        event(3, index=2),
        event(3, index=-1),
        event(3, token_ids=[3.5]),
        event(3, token_ids=[3, 4]),
        event(3, finish_reason="tool_calls"),
        b'{"error": {"message": "EngineCore encountered an issue."}}',
        b"[]",
    ],
)
def test_what_no_server_says_is_garbage(wrong):
    pieces, fault = parse_events([event(3), wrong], 2)
    assert len(pieces) == 1 and isinstance(fault, AnswerFault)
