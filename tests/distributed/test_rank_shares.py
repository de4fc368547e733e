"""Rows are split over processes: equally many each, groups together, at about the same cost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_a3po.distributed.balance import balanced_partition
from trl_a3po.distributed.rank_shares import balanced_order, imbalance, row_cost


@given(st.data())
def test_every_row_is_in_one_share_and_groups_stay_neighbours(data):
    processes = data.draw(st.sampled_from([1, 2, 3, 4]))
    size = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    groups = data.draw(st.integers(1, 6)) * processes
    costs = data.draw(
        st.lists(st.lists(st.floats(1, 1e6), min_size=size, max_size=size), min_size=groups, max_size=groups)
    )
    order = balanced_order(costs, processes)
    assert sorted(order) == [(group, row) for group in range(groups) for row in range(size)]
    runs = [group for group, _ in itertools.groupby(order, key=lambda pair: pair[0])]
    assert len(runs) == groups


def test_a_group_larger_than_a_share_is_balanced_row_by_row():
    # Two processes share each group of four: the two long rows go one to each.
    order = balanced_order([[9, 9, 1, 1], [1, 9, 1, 9]], 4)
    shares = [order[i : i + 2] for i in range(0, 8, 2)]
    assert [sum([[9, 9, 1, 1], [1, 9, 1, 9]][group][row] for group, row in share) for share in shares] == [10] * 4


def test_stretches_that_cut_groups_leave_the_order():
    assert balanced_order([[1, 2, 3], [4, 5, 6]], 3) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert balanced_order([[5, 1], [1, 1], [9, 1]], 2) == [(g, r) for g in range(3) for r in range(2)]


def test_rows_that_cannot_be_shared_equally_are_refused():
    with pytest.raises(ValueError, match="6 rows cannot be split equally over 4 processes"):
        balanced_order([[1, 1, 1], [1, 1, 1]], 4)


def test_a_straggler_ten_times_longer_costs_what_it_must():
    lengths = [[32] * 4 for _ in range(8)]
    lengths[0] = [32, 32, 32, 320]
    lengths[1] = lengths[2] = lengths[3] = [64] * 4
    costs = [[row_cost(length, 64) for length in group] for group in lengths]
    before = [cost for group in costs for cost in group]
    order = balanced_order(costs, 2)
    after = [costs[group][row] for group, row in order]
    assert imbalance(before, 2) > 1.4 > 1.1 > imbalance(after, 2)


@pytest.mark.parametrize(("tokens", "hidden", "expected"), [(1, 64, 1 + 1 / 768), (12 * 64, 64, 2 * 12 * 64)])
def test_attention_costs_as_much_as_the_rest_at_twelve_times_the_hidden_size(tokens, hidden, expected):
    assert row_cost(tokens, hidden) == pytest.approx(expected)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 4))
def test_parts_have_one_size_and_hold_every_item(costs, num_parts):
    costs = costs * num_parts
    parts = balanced_partition(costs, num_parts)
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert {len(part) for part in parts} == {len(costs) // num_parts}
    totals = [sum(costs[item] for item in part) for part in parts]
    assert max(totals) - min(totals) <= max(costs) - min(costs)
