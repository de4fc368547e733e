"""A simulated run: closed forms where there is one, and what holds in every run."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_a3po.planning.forecast import bound_seconds
from trl_a3po.planning.rates import EngineSpeed, Rates
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulation import Split, simulate
from trl_a3po.planning.workload import Fixed, Geometric, Workload

TOKENS, GROUPS, GENERATIONS = 100, 8, 8
BATCH_TOKENS = TOKENS * GROUPS * GENERATIONS


def step_of(training, *, engine=1000.0, slots=64, split=None, work=None, publish=0.0, takes=12, **rules):
    """Seconds of an optimizer step, with a training and an engine of so many tokens per second."""
    simulated = simulate(
        work or Workload(Fixed(TOKENS)),
        Rates(EngineSpeed([(64, engine)]), training, publish_seconds=publish),
        split or Split(slots=slots),
        Rules(**{"groups_per_take": GROUPS, "num_generations": GENERATIONS, "max_staleness": 4, **rules}),
        takes=takes,
    )
    return simulated.seconds / simulated.steps, simulated


def test_with_a_slow_engine_a_step_takes_as_long_as_generation():
    step, simulated = step_of(2000.0)
    assert step == pytest.approx(BATCH_TOKENS / 1000)
    assert simulated.engine_idle == pytest.approx(0.0)
    assert simulated.waiting / simulated.seconds == pytest.approx(0.5)


def test_with_slow_training_a_step_takes_as_long_as_training_and_its_publish():
    step, simulated = step_of(500.0, publish=1.0)
    assert step == pytest.approx(BATCH_TOKENS / 500 + 1.0)
    assert simulated.waiting == 0.0
    assert simulated.engine_idle == pytest.approx(simulated.steps * (step - BATCH_TOKENS / 1000))
    assert simulated.slot_seconds == pytest.approx(simulated.steps * 64 * BATCH_TOKENS / 1000)
    assert dict(simulated.staleness) == {4: simulated.tokens}  # an engine that is faster fills the bound


def test_a_synchronous_step_is_the_sum_of_its_parts():
    step, simulated = step_of(2000.0, publish=0.5, max_staleness=0, schedule="sync")
    assert step == pytest.approx(BATCH_TOKENS / 1000 + BATCH_TOKENS / 2000 + 0.5)
    assert dict(simulated.staleness) == {0: simulated.tokens}


def test_one_slot_decodes_one_completion_after_the_other():
    """With equal lengths and one slot, a group of G completions takes G times as long as one."""
    step, _ = step_of(1e9, slots=1)  # below the measured point, a decode step takes as long as there: 64 / 1000 s
    assert step == pytest.approx(BATCH_TOKENS * 64 / 1000)


def test_rewards_of_one_worker_follow_each_other_and_those_of_two_overlap():
    work = Workload(Fixed(TOKENS), Fixed(3.0))
    assert step_of(1e9, work=work)[0] == pytest.approx(GROUPS * 3.0)
    assert step_of(1e9, work=work, reward_workers=2)[0] == pytest.approx(GROUPS * 3.0 / 2)


def test_a_fixed_lag_trains_tokens_of_exactly_that_staleness():
    _, simulated = step_of(2000.0, lag=2, max_staleness=2, schedule="fixed_lag")
    assert dict(simulated.staleness) == {2: simulated.tokens}


def test_a_periodic_step_ends_with_the_training_of_its_last_groups():
    """Four takes of two groups, whose completions are equally long and decoded in turn by 16 slots: all training but
    that of the last take is hidden."""
    quarter = {"groups_per_take": 2, "micro_steps_per_step": 4, "takes_per_generation": 4, "max_staleness": 0}
    step, _ = step_of(4000.0, slots=16, schedule="periodic", takes=48, **quarter)
    generation, training = BATCH_TOKENS * 64 / 16 / 1000, BATCH_TOKENS / 4000
    assert step == pytest.approx(generation + training / 4)


def test_two_iterations_train_twice_and_take_two_optimizer_steps():
    twice = {"num_iterations": 2, "micro_steps_per_take": 2}
    step, simulated = step_of(500.0, **twice)
    assert step == pytest.approx(BATCH_TOKENS / 500)
    assert simulated.steps == 2 * simulated.takes


def test_several_engines_share_the_groups_evenly():
    step, _ = step_of(1e9, split=Split(engines=4, slots=16))
    assert step == pytest.approx(BATCH_TOKENS * 64 / 16 / 1000 / 4, rel=0.02)


speeds = st.sampled_from([100.0, 1000.0, 20_000.0])
rules_of_any_run = st.builds(
    Rules,
    groups_per_take=st.integers(1, 6),
    num_generations=st.integers(1, 4),
    max_staleness=st.integers(0, 5),
    weight_sync_steps=st.just(1),
    micro_steps_per_take=st.integers(1, 3),
    micro_steps_per_step=st.integers(1, 3),
    max_in_flight=st.sampled_from([None, 2, 5]),
    reward_workers=st.integers(1, 3),
)
work_of_any_run = st.builds(
    Workload,
    st.one_of(st.builds(Fixed, st.integers(1, 50)), st.builds(Geometric, st.just(20.0), st.just(80))),
    st.builds(Fixed, st.sampled_from([0.0, 0.3])),
)


@settings(max_examples=60, deadline=None)
@given(work_of_any_run, rules_of_any_run, speeds, speeds, st.integers(1, 3), st.integers(1, 20), st.integers(0, 9))
def test_no_run_breaks_the_bounds_or_loses_a_group(work, rules, engine, training, engines, slots, seed):
    rates, split = Rates(EngineSpeed([(4, engine)]), training, publish_seconds=0.1), Split(1, engines, slots)
    simulated = simulate(work, rates, split, rules, takes=12, seed=seed)

    assert all(0 <= staleness <= rules.max_staleness for staleness in simulated.staleness)

    spent = simulated.training + simulated.waiting + simulated.publishing
    assert spent == pytest.approx(simulated.seconds)
    at_least = simulated.tokens * rules.num_iterations / training
    assert simulated.training == pytest.approx(at_least)
    assert simulated.seconds >= simulated.training

    kinds = Counter(line["kind"] for line in simulated.lines)
    groups = [line for line in simulated.lines if line["kind"] == "group"]
    assert len({line["prompt"] for line in groups}) == len(groups)
    assert {line["outcome"] for line in groups} <= {"trained", "unused"}
    trained = [line for line in groups if line["outcome"] == "trained"]
    assert len(trained) == kinds["take"] * rules.groups_per_take
    times = [[line[name] for name in ("submitted", "finished", "scoring", "scored", "ended")] for line in trained]
    assert times == [sorted(row) for row in times]


@settings(max_examples=40, deadline=None)
@given(rules_of_any_run, speeds, speeds, st.integers(1, 40), st.integers(1, 16))
def test_a_step_takes_no_less_than_generation_or_training_alone(rules, engine, training, length, slots):
    """Over many steps; a few can be faster, with groups that were ready before them."""
    work, split = Workload(Fixed(length), Fixed(0.05)), Split(1, 1, slots)
    rates = Rates(EngineSpeed([(4, engine)]), training, publish_seconds=0.1)
    simulated = simulate(work, rates, split, rules, takes=60)
    backlog = rules.takes_in_bound / simulated.takes
    assert simulated.seconds / simulated.steps >= (1 - backlog) * bound_seconds(work, rates, split, rules) * 0.999


def test_the_same_arguments_give_the_same_run():
    work = Workload(Geometric(50.0, 200))
    assert step_of(700.0, work=work)[1].lines == step_of(700.0, work=work)[1].lines


@pytest.mark.parametrize("change", [{"max_staleness": 4}, {"max_staleness": 1}])
def test_stragglers_cost_less_the_more_may_be_overtaken(change):
    work = Workload(Geometric(100.0, 2000))
    sync, _ = step_of(4000.0, slots=512, work=work, max_staleness=0, takes=40)
    ahead, _ = step_of(4000.0, slots=512, work=work, takes=40, **change)
    assert ahead < sync


def test_the_mean_of_a_geometric_length_is_that_of_its_draws():
    import numpy as np

    lengths = Geometric(60.0, 100)
    drawn = lengths.draw(np.random.default_rng(0), 200_000)
    assert drawn.max() == 100
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert math.isclose(Geometric(1.0, 9).mean, 1.0)
