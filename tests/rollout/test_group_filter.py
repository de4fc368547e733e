"""Which groups the filter drops, and what `on_group` may make of one."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_a3po.errors import RewardError
from trl_a3po.protocol.records import Group, Prompt, Rejection, Rollout, Score
from trl_a3po.rollout.group_filter import NO_VARIANCE, GroupFilter, has_no_variance

NAN = math.nan


def group(score=None):
    rollouts = [Rollout([5, 6], [-1.0, -2.0], [3, 4]), Rollout([7], [-0.5], [3], "length")]
    return Group(Prompt(9, {"prompt": "p"}, [1, 2]), rollouts, score, submitted_version=3, attempt=2)


def filtered(on_group, rewards=((0.0,), (1.0,))):
    return GroupFilter(lambda group: Score([list(row) for row in rewards]), on_group=on_group)(group())


# --- without variance ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards, weights, dropped",
    [
        ([[1.0], [1.0], [1.0]], [1.0], True),
        ([[1.0], [1.0], [0.0]], [1.0], False),
        ([[0.1 + 0.2], [0.3], [0.3]], [1.0], True),
        ([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], True),
        ([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.5], False),
        ([[1.0, 5.0], [1.0, 7.0]], [1.0, 0.0], True),
        ([[1.0, NAN], [NAN, 1.0]], [1.0, 1.0], True),
        ([[NAN, NAN], [0.5, 0.5]], [1.0, 1.0], True),
        ([[NAN], [NAN]], [1.0], True),
        ([[1e6], [1e6 + 1]], [1.0], True),  # as far as float32 can tell, nearly
    ],
)
def test_the_weighted_sums_decide(rewards, weights, dropped):
    assert has_no_variance(rewards, weights, "sum_then_normalize") == dropped


def advantages(rewards, weights, aggregation):
    """As GRPOTrainer computes them for a batch of this one group, before it divides by the deviation."""
    rewards, weights = torch.tensor(rewards, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    if aggregation == "normalize_then_sum":
        rewards = (rewards - rewards.mean(0)) / (rewards.std(0) + 1e-4)
    sums = rewards @ weights
    return sums - sums.mean()


@given(
    rewards=st.lists(st.tuples(*[st.sampled_from([-1.0, 0.0, 0.5, 1.0])] * 2), min_size=2, max_size=5),
    weights=st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * 2),
    aggregation=st.sampled_from(["sum_then_normalize", "normalize_then_sum"]),
)
def test_a_group_is_dropped_exactly_when_its_advantages_are_zero(rewards, weights, aggregation):
    zero = advantages(rewards, weights, aggregation).abs().max().item() < 1e-6
    assert has_no_variance(rewards, weights, aggregation) == zero


def test_a_dropped_group_is_not_shown_to_on_group():
    shown = []
    score = Score([[1.0], [1.0]])
    verdict = GroupFilter(lambda group: score, drops_zero_variance=True, weights=lambda: [1.0], on_group=shown.append)(
        group()
    )
    assert verdict == Rejection("no variance in its rewards") and not shown


def test_a_rejection_by_the_rewards_stands():
    rejection = Rejection("reward timeout")
    assert GroupFilter(lambda group: rejection, on_group=lambda group: 1 / 0)(group()) is rejection


def test_without_filters_the_score_passes():
    score = Score([[1.0], [1.0]])
    assert GroupFilter(lambda group: score)(group()) is score


# --- on_group -----------------------------------------------------------------------------------------------------


def test_none_accepts_the_group_as_it_was_shown():
    shown = []
    assert filtered(shown.append) == group(Score([[0.0], [1.0]]))
    assert shown == [group(Score([[0.0], [1.0]]))]


def test_a_rejection_rejects():
    assert filtered(lambda group: Rejection("too short")) == Rejection("too short")


def test_rollouts_and_rewards_may_change_in_a_new_group_or_in_place():
    def new(group):
        return replace(group, rollouts=group.rollouts[::-1], score=Score([[NAN], [-1.0]]))

    def in_place(group):
        group.rollouts.reverse()
        group.score.rewards[:] = [[NAN], [-1.0]]

    for on_group in (new, in_place):
        changed = filtered(on_group)
        assert changed.rollouts == group().rollouts[::-1] and str(changed.score.rewards) == "[[nan], [-1.0]]"
        assert (changed.submitted_version, changed.attempt, changed.prompt) == (3, 2, group().prompt)


def test_what_it_does_in_place_leaves_the_engines_group_as_it_is():
    original, score = group(), Score([[0.0], [1.0]])
    GroupFilter(lambda group: score, on_group=lambda group: group.rollouts[0].token_ids.clear() or Rejection("x"))(
        original
    )
    assert original == group()


def test_what_it_raises_is_the_cause():
    with pytest.raises(RewardError, match="on_group raised KeyError\\('gold'\\) for prompt 9") as error:
        filtered(lambda group: {}["gold"])
    assert isinstance(error.value.__cause__, KeyError)


def test_an_exit_in_it_is_an_error_that_names_it():
    with pytest.raises(RewardError, match="on_group raised SystemExit\\(3\\) for prompt 9"):
        filtered(lambda group: sys.exit(3))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda group: 0.5, "returned a float"),
        (lambda group: replace(group, rollouts=group.rollouts[:1]), "has 1 rollouts instead of 2"),
        (lambda group: replace(group, score=None), "2 rows of 1 rewards"),
        (lambda group: replace(group, score=Score([[1.0]])), "2 rows of 1 rewards"),
        (lambda group: replace(group, score=Score([[1.0, 2.0], [1.0, 2.0]])), "2 rows of 1 rewards"),
        (lambda group: replace(group, score=Score([[1.0], [math.inf]])), "a reward is infinite"),
        (lambda group: replace(group, score=Score([[1.0], [0.0]], {"a": [1]})), "extra column 'a' has 1 values"),
        (lambda group: replace(group, prompt=Prompt(8, {}, [1, 2])), "its prompt is a different one"),
        (lambda group: group.rollouts[0].logps.pop() and None, "must be aligned"),
        (lambda group: group.rollouts[0].versions.__setitem__(0, 5), "a token has version 5"),
    ],
)
def test_what_cannot_be_trained_on_in_its_place_is_refused(change, message):
    with pytest.raises(RewardError, match="prompt 9") as error:
        filtered(change)
    assert message in str(error.value)


def test_the_weights_are_those_of_the_moment_of_the_group():
    weights = [1.0, 0.0]
    score = Score([[0.0, 1.0], [1.0, 1.0]])
    judge = GroupFilter(lambda group: score, drops_zero_variance=True, weights=lambda: weights)
    assert judge(group()) is score
    weights[:] = [0.0, 1.0]
    assert judge(group()) is NO_VARIANCE


def test_on_group_may_change_its_prompt_without_an_effect_on_the_run():
    original = group()
    original.prompt.example["prompt"] = [{"role": "user", "content": "a"}]

    def on_group(copy):
        copy.prompt.example["prompt"][0]["content"] = "changed"
        copy.prompt.example["more"] = 1

    accepted = GroupFilter(lambda group: Score([[0.0], [1.0]]), on_group=on_group)(original)
    assert accepted.prompt.example["prompt"] == [{"role": "user", "content": "a"}]
    assert "more" not in accepted.prompt.example
