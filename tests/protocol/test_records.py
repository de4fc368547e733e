"""What a rollout may be made of."""

import pytest

from trl_a3po.protocol.records import Rollout


def test_tokens_of_a_tool_lie_between_sampled_ones():
    rollout = Rollout([5, 6, 7, 8], [-1.0, 0.0, 0.0, -2.0], [3, -1, -1, 4])
    assert rollout.sampled_versions == [3, 4]


def test_a_rollout_without_a_sampled_token_is_refused():
    with pytest.raises(ValueError, match="holds no sampled token"):
        Rollout([5, 6], [0.0, 0.0], [-1, -1])


def test_a_token_that_no_policy_sampled_has_no_log_prob():
    with pytest.raises(ValueError, match=r"Completion token 1 has version -1.*the log-prob -0.5: it must be 0"):
        Rollout([5, 6], [-1.0, -0.5], [0, -1])
