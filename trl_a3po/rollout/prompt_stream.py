"""The prompt stream: dataset rows in, tokenised prompts out, with a cursor.

Guarantees: only the thread that calls `fill` reads and tokenises rows (the main thread: datasets and tokenizers are
not thread-safe); prompts come out in the order of the rows, each once, numbered without gaps.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trl_a3po.protocol.records import Prompt


class PromptStream:
    """Tokenises ahead and hands out prompts one by one.

    Args:
        source: dataset rows in training order, over all epochs.
        tokenize: row -> token ids of its prompt.
        first_row: number of the first row of `source`; earlier rows are not needed any more.
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
            ValueError: the source ends before `cursor`.
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
                found[self.cursor] = Prompt(self.cursor, row, self._tokenize(row) if saved is None else list(saved))
            self.cursor += 1
        self._tokenised = self.cursor
        return found

    def fill(self, count: int) -> None:
        """Tokenise until `count` prompts are buffered or the source ends. Main thread only.

        Raises:
            ValueError: a row's prompt has no tokens. The next call raises for the same row.
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
        self.cursor += 1
        return prompt
