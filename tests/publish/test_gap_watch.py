"""What is a normal gap between engine and trainer, and what happens beyond it."""

import logging
import math

import pytest
import torch

from trl_a3po.errors import DeliveryError
from trl_a3po.publish.gap_watch import PATIENCE, GapWatch


def watch(dtype=torch.float32, **options) -> GapWatch:
    return GapWatch("the tokens", dtype, **options)


@pytest.mark.parametrize(
    ("dtype", "first", "limit"),
    [
        (torch.float32, 1e-6, 0.005),
        (torch.float32, 0.001, 0.01),
        (torch.float32, 0.07, 0.02),
        (torch.float16, 0.001, 0.02),
        (torch.bfloat16, 0.002, 0.1),
        (torch.bfloat16, 0.02, 0.2),
        (torch.bfloat16, 0.5, 0.3),
    ],
)
def test_the_first_gap_sets_the_limit_within_the_bounds_of_the_dtype(dtype, first, limit):
    gaps = watch(dtype)
    assert gaps.see(first) is (first <= limit)
    assert gaps.limit == pytest.approx(limit)
    assert gaps.see(limit) and not gaps.see(1.01 * limit)


def test_a_gap_beyond_the_limit_is_one_warning_and_then_an_error_with_the_numbers(caplog):
    gaps = watch(explain=lambda: "It is the moon.")
    gaps.see(1e-5)
    with caplog.at_level(logging.WARNING, logger="trl_a3po"):
        assert [gaps.see(0.07) for _ in range(PATIENCE - 1)] == [False] * (PATIENCE - 1)
    (warning,) = [record.getMessage() for record in caplog.records]
    for words in ("0.07 from the trainer's", "more than 0.005", "first gap, which was 1e-05", "It is the moon."):
        assert words in warning
    with pytest.raises(DeliveryError, match=r"0\.25 from.*number 5 in a row.*set max_engine_gap to more than 0\.25"):
        gaps.see(0.25)


def test_a_normal_gap_in_between_begins_the_count_again():
    gaps = watch()
    for gap in [0.07] * (PATIENCE - 1) + [1e-5] + [0.07] * (PATIENCE - 1):
        gaps.see(gap)
    with pytest.raises(DeliveryError):
        gaps.see(math.nan)


def test_a_gap_that_is_no_number_is_not_normal_and_sets_no_limit():
    gaps = watch()
    assert not gaps.see(math.nan)
    assert gaps.see(0.001) and gaps.limit == pytest.approx(0.01)


def test_the_setting_decides_where_it_is_given():
    gaps = watch(most=0.3)
    assert gaps.see(0.25) and gaps.see(0.29) and not gaps.see(0.31)
