"""The prompt stream: dataset rows in, tokenised prompts out, with a cursor.

Guarantees: rows are read and tokenised only by the thread that calls `fill` (the main thread: datasets and tokenizers
are not thread-safe); prompts come out in the order of the rows, each once, numbered without gaps.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from trl_a3po.protocol.records import Prompt


class PromptStream:
    """Tokenises ahead and hands out prompts one by one.

    Args:
        source: dataset rows in training order, over all epochs.
        tokenize: row -> token ids of its prompt.
        first_row: number of the first row of `source`; those before it are done with.
    """

    def __init__(
        self, source: Iterator[dict[str, Any]], tokenize: Callable[[dict[str, Any]], list[int]], first_row: int = 0
    ):
        self._source = source
        self._tokenize = tokenize
        self._buffer: deque[Prompt] = deque()
        self._row: dict[str, Any] | None = None  # read and not yet tokenised: a row that raises is not skipped
        self._tokenised = first_row
        self.cursor = first_row
        self.source_ended = False

    @property
    def buffered(self) -> int:
        """Prompts tokenised and not yet popped."""
        return len(self._buffer)

    @property
    def exhausted(self) -> bool:
        """No prompt is left, neither buffered nor in the source."""
        return self.source_ended and not self._buffer

    def recall(self, cursor: int, indices: Collection[int]) -> dict[int, Prompt]:
        """Pass over the rows up to `cursor`, tokenising only `indices` among them, which are returned. Main thread
        only, before anything else is read.

        Raises:
            ValueError: the source ends before `cursor`.
        """
        recalled = {}
        while self.cursor < cursor:
            row = next(self._source, None)
            if row is None:
                raise ValueError(
                    f"The prompt stream ends after {self.cursor} rows, but {cursor} had been used when the checkpoint "
                    "was saved: resume with the dataset of that run."
                )
            if self.cursor in indices:
                recalled[self.cursor] = Prompt(self.cursor, row, self._tokenize(row))
            self.cursor += 1
        self._tokenised = self.cursor
        return recalled

    def fill(self, count: int) -> None:
        """Tokenise until `count` prompts are buffered or the source ends. Main thread only.

        Raises:
            ValueError: a row's prompt has no tokens; the same row raises again at the next call.
        """
        while len(self._buffer) < count and not self.source_ended:
            if self._row is None:
                try:
                    self._row = next(self._source)
                except StopIteration:
                    self.source_ended = True
                    return
            token_ids = self._tokenize(self._row)
            if not token_ids:
                raise ValueError(
                    f"Row {self._tokenised} of the prompt stream has an empty prompt after tokenisation, and nothing "
                    f"can be sampled from it: remove or repair it in the dataset. The row: {repr(self._row)[:300]}"
                )
            self._buffer.append(Prompt(self._tokenised, self._row, token_ids))
            self._tokenised += 1
            self._row = None

    def peek(self, count: int) -> list[Prompt]:
        """The next `count` prompts, or those that are left; they stay in the stream. Main thread only.

        Raises:
            ValueError: as `fill`.
        """
        self.fill(count)
        return list(itertools.islice(self._buffer, count))

    def pop(self) -> Prompt:
        """The next prompt.

        Raises:
            IndexError: nothing is buffered.
        """
        prompt = self._buffer.popleft()
        self.cursor += 1
        return prompt
