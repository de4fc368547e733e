"""The arithmetic of packing, against the plainest way to say it: for every token, which sequence and place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forward.models import micro_batch
from trl_a3po.forward.layout import pack, rows_by_prompt


@st.composite
def batches(draw):
    """Rows of a few prompts, each with a completion, possibly empty."""
    prompts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    rows = draw(st.lists(st.tuples(st.integers(0, len(prompts) - 1), st.integers(0, 4)), min_size=1, max_size=7))
    same = [[i for i, (prompt, _) in enumerate(rows) if prompt == number] for number in range(len(prompts))]
    return micro_batch([prompts[p] for p, _ in rows], [c for _, c in rows], [s for s in same if s], pad=1)


def sequences(ids, mask):
    return [row[keep].tolist() for row, keep in zip(ids, mask.bool(), strict=True)]


@settings(deadline=None, max_examples=200)
@given(batches(), st.booleans())
def test_every_scored_token_is_predicted_from_exactly_what_comes_before_it(batch, share):
    ids, mask, width = batch
    packed = pack(mask, width, rows_by_prompt(ids, mask, width) if share else ())
    completions = mask[:, -width:].sum(1).tolist()
    if packed is None:
        assert not any(completions)
        return
    flat = ids.reshape(-1)
    tokens, row = flat[packed.tokens].tolist(), packed.row
    found = {}
    for scoring, target, place in zip(
        packed.scoring.tolist(), packed.targets.tolist(), packed.places.tolist(), strict=True
    ):
        segment = next(s for s in row.segments if s.start <= scoring < s.end)
        before = tokens[segment.start : scoring + 1]
        if segment.prefix is not None:
            before = tokens[row.segments[segment.prefix].tokens] + before
        assert packed.positions[scoring] == len(before) - 1
        found[divmod(place, width)] = before, int(flat[target])
    whole = sequences(ids, mask)
    assert found == {
        (number, token): (sequence[: len(sequence) - count + token], sequence[len(sequence) - count + token])
        for number, (sequence, count) in enumerate(zip(whole, completions, strict=True))
        for token in range(count)
    }


@settings(deadline=None, max_examples=100)
@given(batches(), st.booleans())
def test_segments_cover_the_row_and_every_token_predicts_something(batch, share):
    ids, mask, width = batch
    packed = pack(mask, width, rows_by_prompt(ids, mask, width) if share else ())
    if packed is None:
        return
    ends = [0, *(segment.end for segment in packed.row.segments)]
    assert [segment.start for segment in packed.row.segments] == ends[:-1]
    assert all(segment.length > 0 for segment in packed.row.segments)
    assert packed.row.tokens == len(packed.tokens) == len(packed.positions)
    prompts = {tuple(i[m.bool()].tolist()) for i, m in zip(ids[:, :-width], mask[:, :-width], strict=True)}
    if share and mask[:, -width:].any(1).all():
        expected = sum(map(len, prompts)) + sum(max(int(c) - 1, 0) for c in mask[:, -width:].sum(1))
        assert packed.row.tokens == expected


def test_counts_of_tokens_and_pairs_are_those_of_the_formula():
    prompt, completion, group = 6, 5, 4
    ids, mask, width = micro_batch([prompt] * group, [completion + 1] * group, [list(range(group))])
    unshared, shared = pack(mask, width), pack(mask, width, rows_by_prompt(ids, mask, width))
    assert unshared.row.tokens == group * (prompt + completion)
    assert shared.row.tokens == prompt + group * completion
    triangle = lambda n: n * (n + 1) // 2  # noqa: E731
    assert unshared.row.pairs == group * triangle(prompt + completion)
    assert shared.row.pairs == triangle(prompt) + group * (prompt * completion + triangle(completion))


def test_padding_inside_a_prompt_or_a_completion_is_refused():
    for column in (3, 7):
        _, mask, width = micro_batch([4], [4], pad=1)
        mask[0, column] = 0
        with pytest.raises(ValueError, match="padding between"):
            pack(mask, width)


def test_a_completion_without_a_prompt_is_refused():
    mask = torch.tensor([[0, 0, 1, 1]])
    with pytest.raises(ValueError, match="no prompt"):
        pack(mask, 2)
