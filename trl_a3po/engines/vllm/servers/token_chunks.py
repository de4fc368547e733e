"""vLLM's answers as tokens and log-probs: no I/O.

Guarantees: token ids are vLLM's own, nothing is tokenised again; an answer that is not exactly what was asked for is
an `AnswerFault`. Imports neither torch nor vLLM, for the process that reads them.
"""

from typing import Annotated, Literal, NamedTuple

import msgspec

from trl_a3po.engines.vllm.servers.http import AnswerFault, shown_of

Finish = Literal["stop", "length", "abort"]


class TokenChunk(NamedTuple):
    """Tokens of one sequence, in order; `finish` is `None` while there are more to come."""

    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    token_ids: list[int]
    logps: list[float]
    finish: Finish | None


# What is read of an answer; msgspec passes over the rest, several times faster than `json` reads it.
class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[Annotated[float, msgspec.Meta(ge=-1e6, le=1e-4)]]


class _Choice(msgspec.Struct, gc=False):
    index: Annotated[int, msgspec.Meta(ge=0)]
    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: Finish | None = None


class _Answer(msgspec.Struct, gc=False):
    choices: list[_Choice]


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # the last of brackets within brackets
_answer = msgspec.json.Decoder(_Answer)


def parse_answer(data: bytes, count: int) -> list[TokenChunk]:
    """The `count` sequences of a whole answer."""
    chunks = _chunks(_decoded(data), count)
    if sorted(chunk.index for chunk in chunks) != list(range(count)):
        raise AnswerFault(f"An answer has the sequences {[p.index for p in chunks]}, but {count} were asked for.")
    if any(chunk.finish is None for chunk in chunks):
        raise AnswerFault("An answer holds a completion that is not finished.")
    return chunks


def _decoded(answer: bytes) -> _Answer:
    try:
        return _answer.decode(answer)
    except UNREADABLE as error:
        shown = shown_of(answer.decode(errors="replace"))
        raise AnswerFault(f"An answer is not a completion ({error}){shown}.") from error


def _chunks(answer: _Answer, count: int) -> list[TokenChunk]:
    return [_chunk(choice, count) for choice in answer.choices]


def _chunk(choice: _Choice, count: int) -> TokenChunk:
    token_ids, logps = choice.token_ids or [], choice.logprobs.token_logprobs if choice.logprobs else []
    if choice.index >= count:
        raise AnswerFault(f"An answer has a sequence {choice.index}, but {count} were asked for.")
    if len(token_ids) != len(logps):
        raise AnswerFault(f"An answer has {len(token_ids)} token ids and {len(logps)} log-probs.")
    return TokenChunk(choice.index, token_ids, logps, choice.finish_reason)
