"""Answers that no vLLM server gives."""

import json

import pytest

from trl_a3po.engines.vllm.servers.http import AnswerFault
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
