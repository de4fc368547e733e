"""A micro-batch of padded rows as one row without padding: its tokens, their places, and what they attend to.

Guarantees: every completion token is scored exactly once, by the hidden state of the token before it in its own
sequence; positions are those of the unpadded sequence; the last token of a completion predicts nothing and is left
out; of rows that share a prompt, the packed row holds the prompt once (its last hidden state scores the first
token of each completion). Pure functions of the masks; no model, no attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a packed row.

    Token i of a segment attends to tokens 0 to i of the segment and, where `prefix` is the number of another segment,
    to all tokens of that segment.

    Args:
        start: place of its first token in the row.
        length: number of its tokens, at least one.
        prefix: number of the segment that it continues, if any.
    """

    start: int
    length: int
    prefix: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.end)


class PackedRow:
    """The segments of a packed row, in its order: first the shared prompts, then their continuations, prompt by
    prompt, then the sequences that share no prompt.

    Not a dataclass: under mixed precision FSDP2 copies those among the arguments of a layer, contents included.
    """

    def __init__(self, segments: tuple[Segment, ...]):
        self.segments = segments
        self.cache: dict[Any, Any] = {}  # what attention derives from the segments, once per forward

    @property
    def tokens(self) -> int:
        return self.segments[-1].end

    @property
    def shared(self) -> int:
        """Number of shared prompts, which are the first segments."""
        return len({segment.prefix for segment in self.segments} - {None})

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key it attends to, without a sliding window."""
        return sum(s.length * self.offset(s) + s.length * (s.length + 1) // 2 for s in self.segments)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its shared prompt included."""
        return max(self.offset(segment) + segment.length for segment in self.segments)

    def offset(self, segment: Segment) -> int:
        """Position of a segment's first token in its sequence."""
        return 0 if segment.prefix is None else self.segments[segment.prefix].length


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A padded micro-batch `(B, S)`, its last T columns completions, as a packed row of N tokens that scores M.

    Args:
        row: the segments.
        tokens: `(N,)` place of each token in the flattened `(B·S,)` batch.
        positions: `(N,)` position of each token in its sequence.
        scoring: `(M,)` place in the row of the hidden state that predicts each scored token.
        targets: `(M,)` place of each scored token in the flattened `(B·S,)` batch.
        places: `(M,)` place of each scored token in the flattened `(B·T,)` completions.
    """

    row: PackedRow
    tokens: torch.Tensor
    positions: torch.Tensor
    scoring: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor


Range = tuple[int, int]  # the first of some consecutive numbers, and how many there are


class _RowBuilder:
    """Appends sequences of a padded batch to a packed row."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.tokens: list[Range] = []
        self.positions: list[Range] = []

    def add(self, first: int, length: int, position: int, prefix: int | None = None) -> Segment:
        """Append `length` tokens of the flattened batch, from place `first` on, the first one at `position`."""
        start = self.segments[-1].end if self.segments else 0
        self.segments.append(Segment(start, length, prefix))
        self.tokens.append((first, length))
        self.positions.append((position, length))
        return self.segments[-1]


def _joined(ranges: Sequence[Range]) -> torch.Tensor:
    """The numbers of all ranges, one range after another."""
    firsts, counts = np.array(ranges).T
    before = counts.cumsum() - counts
    return torch.from_numpy(np.arange(counts.sum()) + np.repeat(firsts - before, counts))


def pack(
    attention_mask: torch.Tensor, completion_width: int, groups: Sequence[Sequence[int]] = ()
) -> PackedBatch | None:
    """Pack a micro-batch; `None` when no completion has a token.

    Args:
        attention_mask: `(B, S)`, on the CPU; prompts padded on the left, completions on the right.
        completion_width: T, the columns of the completions.
        groups: for each prompt to be shared, the numbers of the rows that share it; the other rows share nothing.

    Raises:
        ValueError: padding inside a prompt or a completion, or a completion without a prompt.
    """
    prompts, completions = lengths(attention_mask, completion_width)
    size, width = attention_mask.shape
    split = width - completion_width
    if not any(completions):
        return None
    sharing = _sharing_groups(groups, completions)

    packed = _RowBuilder()
    scored: list[int] = []  # rows of the batch
    scoring: list[Range] = []  # places in the packed row
    for rows in sharing:
        length = prompts[rows[0]]
        packed.add(rows[0] * width + split - length, length, 0)
    for number, rows in enumerate(sharing):
        prompt = packed.segments[number]
        for row in rows:
            scored.append(row)
            scoring.append((prompt.end - 1, 1))
            if completions[row] > 1:
                own = packed.add(row * width + split, completions[row] - 1, prompt.length, number)
                scoring.append((own.start, own.length))
    shared_rows = set(chain.from_iterable(sharing))
    for row in range(size):
        if completions[row] == 0 or row in shared_rows:
            continue
        own = packed.add(row * width + split - prompts[row], prompts[row] + completions[row] - 1, 0)
        scored.append(row)
        scoring.append((own.start + prompts[row] - 1, completions[row]))

    return PackedBatch(
        row=PackedRow(tuple(packed.segments)),
        tokens=_joined(packed.tokens),
        positions=_joined(packed.positions),
        scoring=_joined(scoring),
        targets=_joined([(row * width + split, completions[row]) for row in scored]),
        places=_joined([(row * completion_width, completions[row]) for row in scored]),
    )


def _sharing_groups(groups: Sequence[Sequence[int]], completions: Sequence[int]) -> list[list[int]]:
    """The groups with at least two completions. Prompts that no segment continues come last."""
    with_tokens = [[row for row in rows if completions[row] > 0] for rows in groups]
    sharing = [rows for rows in with_tokens if len(rows) > 1]
    return sorted(sharing, key=lambda rows: max(completions[row] for row in rows) == 1)


def lengths(attention_mask: torch.Tensor, completion_width: int) -> tuple[list[int], list[int]]:
    """Number of tokens in the prompt and in the completion of each row. Raises as `pack` does."""
    mask = attention_mask.bool()
    prompt, completion = mask[:, : mask.shape[1] - completion_width], mask[:, mask.shape[1] - completion_width :]
    if (prompt[:, :-1] & ~prompt[:, 1:]).any() or (completion[:, 1:] & ~completion[:, :-1]).any():
        raise ValueError(
            "attention_mask has padding between the tokens of a prompt or of a completion: prompts must be padded on "
            "the left and completions on the right."
        )
    prompts, completions = prompt.sum(1).tolist(), completion.sum(1).tolist()
    if any(p == 0 < c for p, c in zip(prompts, completions, strict=True)):
        raise ValueError("A completion has no prompt, so nothing predicts its first token: give it a prompt.")
    return prompts, completions


def rows_by_prompt(input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_width: int) -> list[list[int]]:
    """The rows of each distinct prompt, in the order of their first rows; `(B, S)` tensors on the CPU."""
    split = input_ids.shape[1] - completion_width
    prompts = torch.where(attention_mask[:, :split].bool(), input_ids[:, :split], -1).numpy()
    by_prompt: dict[bytes, list[int]] = {}  # padded alike, on the left
    for row, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt.tobytes(), []).append(row)
    return list(by_prompt.values())
