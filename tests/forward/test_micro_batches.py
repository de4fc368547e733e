"""Which rows meet in a micro-batch: whole groups where the sizes allow, even sums, nothing across optimizer steps."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_a3po import A3POConfig
from trl_a3po.forward.micro_batches import is_sum_over_rows, micro_batch_order, micro_batches_per_step


def shuffled_groups(groups, size, seed=0):
    rows = list(range(groups * size))
    random.Random(seed).shuffle(rows)
    return [sorted(rows[g * size : (g + 1) * size]) for g in range(groups)]


def micro_batches(order, rows):
    return [set(order[start : start + rows]) for start in range(0, len(order), rows)]


def test_whole_groups_come_together_in_a_micro_batch_that_holds_several():
    groups = shuffled_groups(4, 3)
    batches = micro_batches(micro_batch_order([1.0] * 12, groups, 6), 6)
    assert all(any(set(group) <= batch for batch in batches) for group in groups)


def test_a_micro_batch_smaller_than_a_group_lies_in_one_group():
    groups = shuffled_groups(3, 4)
    for batch in micro_batches(micro_batch_order(list(range(12)), groups, 2), 2):
        assert any(batch <= set(group) for group in groups)


def test_long_rows_are_spread():
    costs = [100, 100, 1, 1, 100, 100, 1, 1]
    for batch in micro_batches(micro_batch_order(costs, [[row] for row in range(8)], 2), 2):
        assert sum(costs[row] for row in batch) == 101


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 5))
def test_any_sizes_keep_every_row_once(sizes, rows):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    groups = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    order = micro_batch_order([1.0] * sum(sizes), groups, rows)
    assert sorted(order) == list(range(sum(sizes)))


@pytest.mark.parametrize(
    ("steps_per_generation", "accumulation", "expected"),
    [(8, 8, 8), (8, 2, 2), (2, 8, 2), (4, 3, 1), (3, 4, 1), (1, 1, 1)],
)
def test_rows_move_only_within_an_optimizer_step(steps_per_generation, accumulation, expected):
    assert micro_batches_per_step(steps_per_generation, accumulation) == expected


@pytest.mark.parametrize(
    ("setting", "sums"),
    [
        ({}, True),
        ({"loss_type": "grpo"}, True),
        ({"loss_type": "bnpo"}, False),
        ({"entropy_coef": 0.01}, False),
        ({"top_entropy_quantile": 0.2}, False),
    ],
)
def test_a_loss_that_depends_on_micro_batches_is_left_alone(tmp_path, setting, sums):
    assert is_sum_over_rows(A3POConfig(str(tmp_path), use_cpu=True, bf16=False, **setting)) == sums
