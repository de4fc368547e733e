"""Staleness and the interpolation weight: the published numbers, and what must be refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_a3po.objectives import interpolation_weight, token_staleness


def test_staleness_counts_versions_and_unsampled_tokens_are_fresh():
    versions = torch.tensor([[-1, -1, 3, 3, 5, 5, 6]], dtype=torch.int32)
    staleness = token_staleness(versions, 6)
    assert staleness.tolist() == [[0, 0, 3, 3, 1, 1, 0]]
    assert staleness.dtype == torch.int32


def test_interpolation_weight_of_a_row_of_several_versions():
    versions = torch.tensor([[-1, -1, 3, 3, 5, 5, 6]])
    weight = interpolation_weight(token_staleness(versions, 6))
    torch.testing.assert_close(weight, torch.tensor([[0, 0, 2 / 3, 2 / 3, 0, 0, 0]]))
    assert weight.dtype == torch.float32


@given(st.integers(1, 10_000))
def test_interpolation_weight_is_one_minus_the_papers_alpha(d):
    assert interpolation_weight(torch.tensor([d])).item() == pytest.approx(1 - 1 / d, abs=1e-7)


def test_fresh_decides_the_weight_at_staleness_zero_only():
    staleness = torch.tensor([[0, 1, 2, 4]])
    assert interpolation_weight(staleness, fresh="behavior").tolist() == [[0, 0, 0.5, 0.75]]
    assert interpolation_weight(staleness, fresh="policy").tolist() == [[1, 0, 0.5, 0.75]]


def test_a_stamp_above_the_version_is_refused_with_both_values_and_the_position():
    with pytest.raises(ValueError, match=r"holds 7 at position \(1, 2\) while the policy version is 6"):
        token_staleness(torch.tensor([[1, 2, 6], [-1, 6, 7]]), 6)


def test_a_stamp_below_minus_one_is_refused():
    with pytest.raises(ValueError, match=r"holds -2 at position \(0, 1\).*no version is below -1"):
        token_staleness(torch.tensor([[1, -2]]), 6)


def test_an_unknown_fresh_is_refused_with_the_options():
    with pytest.raises(ValueError, match="fresh='theta' is unknown: set one of 'behavior', 'policy'"):
        interpolation_weight(torch.tensor([[0]]), fresh="theta")
