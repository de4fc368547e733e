import pytest

from tests.rollout.queue_fakes import make_prompts
from trl_a3po.rollout.left_out import LeftOut
from trl_a3po.rollout.prompt_stream import PromptStream, TokenizedPrompt


def test_prompts_come_in_the_order_of_the_rows_and_are_numbered():
    stream = make_prompts(3)
    stream.fill(3)
    prompts = [stream.pop() for _ in range(3)]
    assert [(prompt.index, prompt.example, prompt.token_ids) for prompt in prompts] == [
        (n, {"number": n}, [1, n]) for n in range(3)
    ]


def test_fill_reads_no_row_more_than_it_needs():
    rows = iter([{"number": n} for n in range(5)])
    stream = PromptStream(rows, lambda row: TokenizedPrompt([1]))
    stream.fill(2)
    stream.fill(2)
    assert next(rows) == {"number": 2}


def test_the_cursor_counts_what_was_popped():
    stream = make_prompts(5)
    stream.fill(5)
    stream.pop()
    assert (stream.cursor, stream.buffered) == (1, 4)


def test_exhausted_only_when_the_source_and_the_buffer_are_empty():
    stream = make_prompts(1)
    stream.fill(2)
    assert stream.source_ended and not stream.exhausted
    stream.pop()
    assert stream.exhausted


def test_pop_without_prompts_raises():
    with pytest.raises(IndexError):
        make_prompts().pop()


def test_an_empty_prompt_is_named_and_never_skipped():
    stream = make_prompts(3, tokenize=lambda row: [] if row["number"] == 1 else [1])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Row 1 .* empty prompt .*'number': 1"):
            stream.fill(3)
    assert stream.buffered == 1


def test_peeked_prompts_stay_and_a_short_source_gives_what_it_has():
    stream = make_prompts(3)
    assert [prompt.index for prompt in stream.peek(2)] == [0, 1] and stream.cursor == 0
    assert [prompt.index for prompt in stream.peek(5)] == [0, 1, 2]
    assert [stream.pop().index for _ in range(3)] == [0, 1, 2] and stream.peek(1) == []


def test_a_row_that_is_left_out_leaves_a_gap_in_the_numbers_and_the_cursor():
    stream = make_prompts(5, tokenize=leaving_out(0, 2))
    stream.fill(9)
    assert [(stream.pop().index, stream.cursor) for _ in range(3)] == [(1, 2), (3, 4), (4, 5)]


def leaving_out(*numbers, reason="too long"):
    return lambda row: LeftOut(reason, f"{row['number']} is bad") if row["number"] in numbers else [1]


def test_a_stream_whose_rows_are_all_left_out_says_why():
    def tokenize(row):
        return [1] if row["number"] < 2 else LeftOut("broken" if row["number"] % 4 else "too long", f"{row} is bad")

    seen = []
    stream = make_prompts(tokenize=tokenize, row_left_out=lambda *row: seen.append(row))
    expected = r"1000 .* \(750 broken, 250 too long\), up to row 1001 .* so that"
    for _ in range(2):
        with pytest.raises(ValueError, match=expected + r" .* The last one: \{'number': 1001\} is bad"):
            stream.fill(3)
    assert stream.left_out == {"broken": 750, "too long": 250}
    assert [number for number, _ in seen] == list(range(2, 1002))


def test_every_row_that_is_left_out_is_reported_and_counted():
    seen = []
    stream = make_prompts(5, tokenize=leaving_out(1, 3), row_left_out=lambda *row: seen.append(row))
    stream.fill(9)
    assert seen == [(1, ("too long", "1 is bad")), (3, ("too long", "3 is bad"))]
    assert stream.left_out == {"too long": 2}


def test_a_row_that_is_left_out_ahead_of_the_cursor_is_not_counted_for_a_run_that_reads_it_again():
    stream = make_prompts(9, tokenize=leaving_out(1, 3, 7))
    stream.fill(6)
    assert stream.left_out_before_cursor == {}
    for before in ({}, {"too long": 1}, {"too long": 2}):
        stream.pop()
        assert stream.left_out_before_cursor == before
    assert stream.left_out == {"too long": 3}
