import pytest

from tests.rollout.queue_fakes import make_prompts
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
    stream = make_prompts(5, tokenize=lambda row: None if row["number"] in (0, 2) else [1])
    stream.fill(9)
    assert [(stream.pop().index, stream.cursor) for _ in range(3)] == [(1, 2), (3, 4), (4, 5)]


def test_a_stream_whose_rows_are_all_left_out_says_so():
    with pytest.raises(ValueError, match="1000 rows in a row have prompts that do not fit"):
        make_prompts(tokenize=lambda row: None).fill(1)
