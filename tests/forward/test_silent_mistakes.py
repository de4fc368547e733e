"""Mistakes that run without an error and train something else. Each is made on purpose here, on a packed row that is
right without it, and must move log-probs far beyond what rounding does: so the comparison with separate sequences,
and the check of the first batch, which makes the same comparison, catch it."""

import pytest
import torch

from tests.forward.models import micro_batch, packable, separate, tiny_model
from trl_a3po.forward import attention
from trl_a3po.forward.layout import PackedBatch, PackedRow, Segment, pack, rows_by_prompt
from trl_a3po.forward.packed import packed_logps
from trl_a3po.forward.self_check import FLOORS

RIGHT, WRONG = 1e-7, 5e-2


@pytest.fixture
def batch():
    return micro_batch([7, 7, 9, 7], [5, 9, 3, 6], same_prompt=[[0, 1, 3]])


def distance(model, batch, layout: PackedBatch | None = None) -> float:
    """Largest distance of the packed log-probs from those of separate sequences."""
    ids, mask, width = batch
    layout = layout or pack(mask, width, rows_by_prompt(ids, mask, width))
    with torch.no_grad():
        return (packed_logps(model, model, ids, layout, width)[0] - separate(model, *batch)[0]).abs().max().item()


def layout_of(batch) -> PackedBatch:
    ids, mask, width = batch
    return pack(mask, width, rows_by_prompt(ids, mask, width))


def changed(layout: PackedBatch, **changes) -> PackedBatch:
    return PackedBatch(**{**vars(layout), **changes})


@pytest.fixture
def model():
    return packable(tiny_model())


def test_without_a_mistake_nothing_moves(model, batch):
    assert distance(model, batch) < RIGHT


def test_the_check_of_the_first_batch_is_finer_than_any_of_them():
    assert FLOORS["full"][1] < WRONG


def test_positions_counted_along_the_row(model, batch):
    layout = layout_of(batch)
    assert distance(model, batch, changed(layout, positions=torch.arange(layout.row.tokens))) > WRONG


def test_positions_that_restart_at_0_after_the_prompt(model, batch):
    layout = layout_of(batch)
    positions = layout.positions.clone()
    for segment in layout.row.segments:
        if segment.prefix is not None:
            positions[segment.tokens] = torch.arange(segment.length)
    assert distance(model, batch, changed(layout, positions=positions)) > WRONG


def test_completions_that_see_each_other(model, batch):
    layout = layout_of(batch)
    first, *others = [s for s in layout.row.segments if s.prefix is not None]
    merged = Segment(first.start, sum(s.length for s in (first, *others)), first.prefix)
    rest = [s for s in layout.row.segments if s.prefix is None]
    row = PackedRow((rest[0], merged, *rest[1:]))
    assert distance(model, batch, changed(layout, row=row)) > WRONG


def test_completions_that_do_not_see_their_prompt(model, batch):
    layout = layout_of(batch)
    row = PackedRow(tuple(Segment(s.start, s.length) for s in layout.row.segments))
    assert distance(model, batch, changed(layout, row=row)) > WRONG


def test_first_tokens_scored_by_the_token_before_them_in_the_row(model, batch):
    layout = layout_of(batch)
    width = batch[2]
    scoring = torch.where(layout.places % width == 0, layout.scoring.roll(1), layout.scoring)
    assert distance(model, batch, changed(layout, scoring=scoring)) > WRONG


def test_sequences_that_see_the_one_before_them(model, batch):
    _, mask, width = batch
    layout = pack(mask, width)
    row = PackedRow((Segment(0, layout.row.tokens),))
    assert distance(model, batch, layout) < RIGHT
    assert distance(model, batch, changed(layout, row=row)) > WRONG


def test_no_mask_lets_transformers_guess_sequences_from_positions(model, batch, monkeypatch):
    """With positions alone, completions that continue a shared prompt become sequences of their own."""
    layout = layout_of(batch)

    def without_mask(**inputs):
        return model(**{**inputs, "attention_mask": None, "packed_row": None})

    with torch.no_grad():
        ids, _, width = batch
        found = packed_logps(without_mask, model, ids, layout, width)[0]
    assert (found - separate(model, *batch)[0]).abs().max() > WRONG


@pytest.mark.parametrize("name", ["mistral-sliding", "qwen3-mixed"])
def test_a_window_that_is_left_out(name, batch, monkeypatch):
    model = packable(tiny_model(name))
    assert distance(model, batch) < RIGHT
    plain = attention.blockwise_attention
    monkeypatch.setattr(attention, "blockwise_attention", lambda *inputs: plain(*inputs[:-1], None))
    assert distance(model, batch) > WRONG


@pytest.mark.parametrize("name", ["mistral-sliding", "qwen3-mixed"])
def test_a_window_along_the_row_instead_of_by_position(name, batch, monkeypatch):
    model = packable(tiny_model(name))
    by_position = attention._block

    def along_the_row(row, bundle, window, device):
        block = by_position(row, bundle, window, device)
        if window is None or block.mask is None:
            return block
        places = torch.cat([torch.arange(place.start, place.stop) for place in block.keys])
        queries = torch.arange(block.queries.start, block.queries.stop)
        everything = by_position(row, bundle, 10_000, device).mask
        if everything is None:
            everything = queries[:, None] >= places
        return attention.Block(block.queries, block.keys, everything & (queries[:, None] - places < window))

    monkeypatch.setattr(attention, "_block", along_the_row)
    assert distance(model, batch) > WRONG


def test_a_mask_of_numbers_where_sdpa_adds_them(model, batch, monkeypatch):
    """1 and 0 as floats are added to the scores: nothing is hidden."""
    by_position = attention._block

    def numbers(*inputs):
        block = by_position(*inputs)
        mask = None if block.mask is None else block.mask.to(torch.float64)
        return attention.Block(block.queries, block.keys, mask)

    monkeypatch.setattr(attention, "_block", numbers)
    assert distance(model, batch) > WRONG


def test_a_model_that_drops_the_packed_row_is_reported(model, batch):
    ids, _, width = batch

    def dropping(**inputs):
        return model(**{**inputs, "packed_row": None})

    with pytest.raises(RuntimeError, match="does not pass keyword arguments on"):
        packed_logps(dropping, model, ids, layout_of(batch), width)


def test_every_hidden_state_that_is_scored_is_finite_when_rows_are_empty(model):
    batch = micro_batch([3, 5, 4], [0, 4, 0])
    assert distance(model, batch) < RIGHT


def test_the_implementation_must_stay_set_for_gradient_checkpointing(batch):
    """The backward runs attention again: set back in between, it would be transformers' own, without segments."""
    model = packable(tiny_model()).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, _, width = batch
    logps = packed_logps(model, model, ids, layout_of(batch), width)[0]
    model.set_attn_implementation("sdpa")
    with pytest.raises(Exception):  # noqa: B017 whatever SDPA says of an empty mask
        logps.sum().backward()


def test_selected_hidden_states_do_not_outlive_a_forward(model, batch):
    ids, mask, _ = batch
    before = model(input_ids=ids, attention_mask=mask).logits.shape
    distance(model, batch)
    assert model(input_ids=ids, attention_mask=mask).logits.shape == before
