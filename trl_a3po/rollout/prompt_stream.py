"""The prompt stream: dataset rows in, tokenised prompts out, with a cursor.

Guarantees: only the thread that calls `fill` reads and tokenises rows (the main thread: datasets and tokenizers are
not thread-safe); prompts come out in the order of the rows, each once, with the number of their row.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from trl_a3po.protocol.images import PromptImages
from trl_a3po.protocol.records import Prompt

LEFT_OUT_IN_A_ROW = 1000  # with none that fits among so many rows, the settings are wrong and not the rows


class TokenizedPrompt(NamedTuple):
    """What is made of a row: fields of a `Prompt`."""

    token_ids: list[int]
    images: PromptImages | None = None
    messages: list[dict[str, Any]] | None = None


class PromptStream:
    """Tokenises ahead and hands out prompts one by one.

    Args:
        source: dataset rows in training order, over all epochs.
        tokenize: row -> its prompt, or `None` to leave the row out.
        first_row: number of the first row of `source`; earlier rows are not needed any more.
        with_tokens: row, token ids -> the prompt of a row that was tokenised in an earlier run.
    """

    def __init__(
        self,
        source: Iterator[dict[str, Any]],
        tokenize: Callable[[dict[str, Any]], TokenizedPrompt | None],
        first_row: int = 0,
        with_tokens: Callable[[dict[str, Any], list[int]], TokenizedPrompt] = lambda row, ids: TokenizedPrompt(ids),
    ):
        self._source = source
        self._tokenize = tokenize
        self._with_tokens = with_tokens
        self._buffer: deque[Prompt] = deque()
        self._row: dict[str, Any] | None = None  # read and not yet tokenised: a row that raises is not skipped
        self._tokenised = first_row
        self.cursor = first_row
        self.source_ended = False
        self._left_out = 0  # rows since the last one that was not left out

    @property
    def buffered(self) -> int:
        """How many prompts are tokenised and not yet popped."""
        return len(self._buffer)

    @property
    def exhausted(self) -> bool:
        """No prompt is left, neither buffered nor in the source."""
        return self.source_ended and not self._buffer

    def fast_forward(self, cursor: int, prompts: Mapping[int, list[int] | None]) -> dict[int, Prompt]:
        """Skip the rows up to `cursor`, and return the prompts of those whose numbers are in `prompts`, with the
        tokens given there; a row with `None` is tokenised. Main thread only, before any other read.

        Raises:
            ValueError: the source ends before `cursor`, or a prompt that was begun is now left out or another one.
        """
        found = {}
        while self.cursor < cursor:
            row = next(self._source, None)
            if row is None:
                raise ValueError(
                    f"The prompt stream ends after {self.cursor} rows, but {cursor} had been used when the checkpoint "
                    "was saved: resume with the dataset of that run."
                )
            if self.cursor in prompts:
                saved = prompts[self.cursor]
                made = self._tokenize(row) if saved is None else self._with_tokens(row, list(saved))
                if made is None:
                    raise ValueError(
                        f"Row {self.cursor} of the prompt stream had been begun when the checkpoint was saved, and "
                        "does not fit any more: resume with the chat template and the max_completion_length of that "
                        "run."
                    )
                found[self.cursor] = Prompt(self.cursor, row, *made)
            self.cursor += 1
        self._tokenised = self.cursor
        return found

    def fill(self, count: int) -> None:
        """Tokenise until `count` prompts are buffered or the source ends. Main thread only.

        Raises:
            ValueError: a row's prompt has no tokens, or `LEFT_OUT_IN_A_ROW` rows in a row are left out. The next call
                raises for the same row.
        """
        while len(self._buffer) < count and not self.source_ended:
            if self._row is None:
                try:
                    self._row = next(self._source)
                except StopIteration:
                    self.source_ended = True
                    return
            made = self._tokenize(self._row)
            if made is None:
                self._leave_out_row()
                continue
            self._left_out = 0
            if not made.token_ids:
                raise ValueError(
                    f"Row {self._tokenised} of the prompt stream has an empty prompt after tokenisation, and nothing "
                    f"can be sampled from it: remove or repair it in the dataset. The row: {repr(self._row)[:300]}"
                )
            self._buffer.append(Prompt(self._tokenised, self._row, *made))
            self._tokenised += 1
            self._row = None

    def _leave_out_row(self) -> None:
        self._left_out += 1
        if self._left_out >= LEFT_OUT_IN_A_ROW:
            raise ValueError(
                f"{self._left_out} rows in a row have prompts that do not fit, up to row {self._tokenised} of the "
                "prompt stream: shorten the prompts, or lower max_completion_length."
            )
        self._tokenised += 1
        self._row = None

    def peek(self, count: int) -> list[Prompt]:
        """The next `count` prompts, or as many as are left. They stay in the stream. Main thread only.

        Raises:
            ValueError: as for `fill`.
        """
        self.fill(count)
        return list(itertools.islice(self._buffer, count))

    def pop(self) -> Prompt:
        """Remove and return the next prompt.

        Raises:
            IndexError: no prompt is buffered.
        """
        prompt = self._buffer.popleft()
        self.cursor = prompt.index + 1
        return prompt
