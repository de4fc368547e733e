"""Answers that no vLLM server gives, and how long a call waits for one."""

import http.server
import itertools
import json
import threading

import pytest

from trl_a3po.engines.vllm.servers.http import AnswerFault, Call, TimeoutFault
from trl_a3po.engines.vllm.servers.token_chunks import parse_answer


def answer(token: int, logp: float = -1.0, index: int = 0, **changes) -> bytes:
    choice = {"index": index, "token_ids": [token], "logprobs": {"token_logprobs": [logp]}, "finish_reason": "length"}
    return json.dumps({"choices": [choice | changes], "usage": None}).encode()


def test_an_answer_is_read():
    (chunk,) = parse_answer(answer(3), 1)
    assert (chunk.index, chunk.token_ids, chunk.logps, chunk.finish) == (0, [3], [-1.0], "length")


@pytest.mark.parametrize(
    "wrong",
    [
        answer(-1),
        answer(3, logp=0.5),
        answer(3, logp=float("nan")),
        answer(3, logp=float("-inf")),
        answer(3, index=1),
        answer(3, index=-1),
        answer(3, token_ids=[3.5]),
        answer(3, token_ids=[3, 4]),
        answer(3, finish_reason="tool_calls"),
        answer(3, finish_reason=None),
        b'{"error": {"message": "EngineCore encountered an issue."}}',
        b"[]",
        b"{",
    ],
)
def test_what_no_server_says_is_garbage(wrong):
    with pytest.raises(AnswerFault):
        parse_answer(wrong, 1)


@pytest.fixture
def slow_server():
    """The URL of a server that answers with what it was sent, once the event is set."""
    ready = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            ready.wait(60)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *args: None  # the client has left
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", ready
        ready.set()
        server.shutdown()


def test_the_timeout_of_a_call_is_by_its_clock(slow_server):
    """Which stands still while the process is stopped."""
    url, ready = slow_server
    looks = itertools.count()

    def stands_still():
        if next(looks) == 20:
            ready.set()
        return 0.0

    body = "x" * 10_000_000  # more than a socket takes at once
    assert Call(url, "POST", "/", body, timeout=0.01, clock=stands_still).text() == json.dumps(body)


def test_a_call_ends_at_its_timeout(slow_server):
    url, _ = slow_server
    with pytest.raises(TimeoutFault, match="did not answer within 60 s"):
        Call(url, "POST", "/", "x", timeout=60.0, clock=itertools.count(step=15).__next__).text()
