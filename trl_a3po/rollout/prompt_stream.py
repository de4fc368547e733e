"""The prompt stream: dataset rows in, tokenised prompts out, with a cursor.

Guarantees: only the thread that calls `fill` reads and tokenises rows (the main thread: datasets and tokenizers are
not thread-safe); prompts come out in the order of the rows, each once, with the number of their row; every row that
is left out is counted once, also in a run that is resumed.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from trl_a3po.protocol.images import PromptImages
from trl_a3po.protocol.records import Prompt
from trl_a3po.rollout.left_out import LeftOut, reasons_in_words

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
        tokenize: row -> its prompt, or why the row is left out.
        first_row: number of the first row of `source`; earlier rows are not needed any more.
        with_tokens: row, token ids -> the prompt of a row that was tokenised in an earlier run.
        row_left_out: called with the number of each row that is left out, and why it is.

    Attributes:
        left_out: reason -> how many rows of the run were left out for it so far.
    """

    def __init__(
        self,
        source: Iterator[dict[str, Any]],
        tokenize: Callable[[dict[str, Any]], TokenizedPrompt | LeftOut],
        first_row: int = 0,
        with_tokens: Callable[[dict[str, Any], list[int]], TokenizedPrompt] = lambda row, ids: TokenizedPrompt(ids),
        row_left_out: Callable[[int, LeftOut], None] = lambda number, left_out: None,
    ):
        self._source = source
        self._tokenize = tokenize
        self._with_tokens = with_tokens
        self._row_left_out = row_left_out
        self._buffer: deque[Prompt] = deque()
        self._row: dict[str, Any] | None = None  # read and not yet tokenised: a row that raises is not skipped
        self._tokenised = first_row
        self.cursor = first_row
        self.source_ended = False
        self.left_out: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()  # of those, since the last row that was not left out
        self._none_fits: str | None = None  # why the stream has ended for good
        self._ahead: list[tuple[int, str]] = []  # of those, the numbers and reasons of which some are after the cursor

    @property
    def buffered(self) -> int:
        """How many prompts are tokenised and not yet popped."""
        return len(self._buffer)

    @property
    def exhausted(self) -> bool:
        """No prompt is left, neither buffered nor in the source."""
        return self.source_ended and not self._buffer

    @property
    def left_out_before_cursor(self) -> dict[str, int]:
        """`left_out` without the rows that a run which continues at the cursor reads again. Main thread only."""
        return dict(self.left_out - Counter(reason for number, reason in self._ahead if number >= self.cursor))

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
                if isinstance(made, LeftOut):
                    raise ValueError(
                        f"Row {self.cursor} of the prompt stream had been begun when the checkpoint was saved, and "
                        "cannot be used any more: resume with the data, the chat template and the processor of that "
                        f"run. {made.text}"
                    )
                found[self.cursor] = Prompt(self.cursor, row, *made)
            self.cursor += 1
        self._tokenised = self.cursor
        return found

    def fill(self, count: int) -> None:
        """Tokenise until `count` prompts are buffered or the source ends. Main thread only.

        Raises:
            ValueError: a row's prompt has no tokens, or `LEFT_OUT_IN_A_ROW` rows in a row are left out. Every
                further call raises the same.
        """
        while len(self._buffer) < count and not self.source_ended:
            if self._none_fits is not None:
                raise ValueError(self._none_fits)
            if self._row is None:
                try:
                    self._row = next(self._source)
                except StopIteration:
                    self.source_ended = True
                    return
            made = self._tokenize(self._row)
            if isinstance(made, LeftOut):
                self._leave_out_row(made)
                continue
            self._in_a_row.clear()
            if not made.token_ids:
                raise ValueError(
                    f"Row {self._tokenised} of the prompt stream has an empty prompt after tokenisation, and nothing "
                    f"can be sampled from it: remove or repair it in the dataset. The row: {repr(self._row)[:300]}"
                )
            self._buffer.append(Prompt(self._tokenised, self._row, *made))
            self._tokenised += 1
            self._row = None

    def _leave_out_row(self, left_out: LeftOut) -> None:
        self.left_out[left_out.reason] += 1
        self._in_a_row[left_out.reason] += 1
        self._ahead = [row for row in self._ahead if row[0] >= self.cursor]
        self._ahead.append((self._tokenised, left_out.reason))
        self._row_left_out(self._tokenised, left_out)
        self._tokenised += 1
        self._row = None
        if self._in_a_row.total() >= LEFT_OUT_IN_A_ROW:
            self._none_fits = (
                f"{self._in_a_row.total()} rows in a row are left out ({reasons_in_words(self._in_a_row)}), up to row "
                f"{self._tokenised - 1} of the prompt stream, so that nothing is left to train on. The last one: "
                f"{left_out.text}"
            )

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
