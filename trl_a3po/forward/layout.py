"""A micro-batch of padded rows as one row without padding: which tokens it holds, where, and what they may see.

Guarantees: every completion token is scored exactly once, by the hidden state of the token before it in its own
sequence; positions are those of the unpadded sequence; the last token of a completion predicts nothing and is left
out; of rows that share a prompt, the prompt is there once (its last hidden state scores the first token of each of
them). Pure functions of the masks; no model, no attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a packed row.

    Token i of a segment sees tokens 0 to i of it and, when `prefix` is the number of another segment, all of that one.

    Args:
        start: place of its first token in the row.
        length: its tokens, at least one.
        prefix: number of the segment that it continues.
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


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The segments of a packed row, in the order of the row: shared prompts first, then what continues them, prompt by
    prompt, then sequences that share nothing."""

    segments: tuple[Segment, ...]
    cache: dict = field(default_factory=dict)  # what attention derives from the segments, once a forward

    @property
    def tokens(self) -> int:
        return self.segments[-1].end

    @property
    def shared(self) -> int:
        """Number of segments that others continue: the first ones."""
        return len({segment.prefix for segment in self.segments} - {None})

    @property
    def pairs(self) -> int:
        """Pairs (query, visible key), without a sliding window."""
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
        tokens: `(N,)` where each token of the row lies in the flattened `(B·S,)` batch.
        positions: `(N,)` its position in its sequence.
        scoring: `(M,)` place in the row of the hidden state that predicts each scored token.
        targets: `(M,)` where the scored token lies in the flattened `(B·S,)` batch.
        places: `(M,)` where it lies in the flattened `(B·T,)` completions.
    """

    row: PackedRow
    tokens: torch.Tensor
    positions: torch.Tensor
    scoring: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor


def pack(
    attention_mask: torch.Tensor, completion_width: int, mates: Sequence[Sequence[int]] = ()
) -> PackedBatch | None:
    """Pack a micro-batch; `None` when no completion has a token.

    Args:
        attention_mask: `(B, S)`, on the CPU; prompts padded on the left, completions on the right.
        completion_width: T, the columns of the completions.
        mates: rows that have the same prompt and shall share it, as lists of row numbers; the others share nothing.

    Raises:
        ValueError: padding inside a prompt or a completion, or a completion without a prompt.
    """
    prompts, completions = lengths(attention_mask, completion_width)
    size, width = attention_mask.shape
    split = width - completion_width
    kept = [row for row in range(size) if completions[row] > 0]
    if not kept:
        return None
    groups = [[row for row in rows if completions[row] > 0] for rows in mates]
    groups = [rows for rows in groups if len(rows) > 1]
    groups.sort(key=lambda rows: max(completions[row] for row in rows) == 1)  # those that nothing continues come last
    sharing = {row for rows in groups for row in rows}

    segments: list[Segment] = []
    tokens: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    scored: list[tuple[int, torch.Tensor]] = []  # row of the batch, places in the packed row

    def add(first: int, length: int, position: int, prefix: int | None = None) -> Segment:
        start = segments[-1].end if segments else 0
        segments.append(Segment(start, length, prefix))
        tokens.append(torch.arange(first, first + length))
        positions.append(torch.arange(position, position + length))
        return segments[-1]

    for rows in groups:
        prompt = prompts[rows[0]]
        add(rows[0] * width + split - prompt, prompt, 0)
    for number, rows in enumerate(groups):
        prompt = segments[number]
        for row in rows:
            places = torch.tensor([prompt.end - 1])
            if completions[row] > 1:
                own = add(row * width + split, completions[row] - 1, prompt.length, number)
                places = torch.cat([places, torch.arange(own.start, own.end)])
            scored.append((row, places))
    for row in kept:
        if row not in sharing:
            prompt, completion = prompts[row], completions[row]
            own = add(row * width + split - prompt, prompt + completion - 1, 0)
            scored.append((row, torch.arange(own.start + prompt - 1, own.end)))

    counts = [(row, torch.arange(completions[row])) for row, _ in scored]
    return PackedBatch(
        row=PackedRow(tuple(segments)),
        tokens=torch.cat(tokens),
        positions=torch.cat(positions),
        scoring=torch.cat([places for _, places in scored]),
        targets=torch.cat([row * width + split + count for row, count in counts]),
        places=torch.cat([row * completion_width + count for row, count in counts]),
    )


def lengths(attention_mask: torch.Tensor, completion_width: int) -> tuple[list[int], list[int]]:
    """Tokens of each row's prompt and completion. Raises as `pack`."""
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


def prompt_mates(input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_width: int) -> list[list[int]]:
    """Rows by equal prompts, in the order of their first rows; `(B, S)` tensors on the CPU."""
    split = input_ids.shape[1] - completion_width
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(input_ids)):
        prompt = input_ids[row, :split][attention_mask[row, :split].bool()]
        by_prompt.setdefault(tuple(prompt.tolist()), []).append(row)
    return list(by_prompt.values())
