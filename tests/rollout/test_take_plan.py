import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_a3po.rollout.take_plan import TakePlan, staleness_of_schedule, starves

small = st.integers(1, 6)


def plan(batch=2, max_staleness=1, steps=1, first=0, total=10**6):
    return TakePlan(batch, max_staleness, lambda take: first + take * steps, total)


@given(small, st.integers(0, 9), small, st.integers(0, 20), st.integers(0, 5), st.integers(0, 12))
def test_capacity_is_the_design_rule_counted_with_the_batch_in_training(batch, bound, steps, first, takes, lag):
    """Invariant 2: submit iff t + K·floor(i/B) <= published + max_staleness, i counting the batch in training."""
    last_taken = first + takes * steps
    published = max(0, last_taken - lag)
    groups = 0
    while last_taken + steps * ((batch + groups) // batch) <= published + bound:
        groups += 1
    assert plan(batch, bound, steps, first).capacity(takes + 1, published) == groups


@given(small, st.integers(0, 9))
def test_outstanding_with_one_step_a_batch_and_a_publish_a_step(batch, bound):
    assert batch + plan(batch, bound).capacity(1, 0) == (bound + 1) * batch


def test_no_staleness_admits_the_published_version_s_batch_and_nothing_ahead():
    assert plan(4, 0).capacity(0, 0) == 4
    assert plan(4, 0).capacity(1, 0) == 0


def test_nothing_is_admitted_beyond_the_last_take():
    assert plan(4, 100, total=3).capacity(2, 0) == 4
    assert plan(4, 100, total=3).capacity(3, 0) == 0


def test_takes_that_share_a_version_are_admitted_together():
    shared = TakePlan(2, 1, lambda take: take // 3, 100)
    assert shared.capacity(0, 0) == 12


@pytest.mark.parametrize("setting", ["groups_per_batch", "max_staleness", "total_takes"])
def test_an_impossible_setting_is_named(setting):
    values = {"groups_per_batch": 1, "max_staleness": 0, "total_takes": 1, setting: -1}
    with pytest.raises(ValueError, match=f"{setting} is -1"):
        TakePlan(version_of_take=lambda take: take, **values)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12))
def test_starves_agrees_with_a_run_that_publishes_every_multiple(sync, steps, bound):
    assert starves(sync, steps, bound) == any(
        version > version // sync * sync + bound for version in range(0, 2 * sync * steps, steps)
    )


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12))
def test_settings_that_do_not_starve_suffice_when_publishing_only_at_takes(sync, steps, bound):
    published, starved = 0, False
    for version in range(0, 2 * sync * steps, steps):
        if version - published >= sync:
            published = version
        starved |= version > published + bound
    assert starves(sync, steps, bound) or not starved


def test_sync_is_the_same_queue_without_staleness():
    assert staleness_of_schedule("async", 4) == 4
    assert staleness_of_schedule("sync", 4) == 0
    with pytest.raises(ValueError, match='schedule is "later"'):
        staleness_of_schedule("later", 4)
