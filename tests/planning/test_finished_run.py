"""What is read from a timeline: a simulated run gives back what it was simulated from."""

from dataclasses import replace

import pytest

from trl_a3po.planning.finished_run import finished_run, rates_of
from trl_a3po.planning.forecast import forecast
from trl_a3po.planning.rates import EngineSpeed, Rates
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulation import Split, simulate
from trl_a3po.planning.workload import Fixed, Geometric, Workload

RULES = Rules(groups_per_take=8, num_generations=4, max_staleness=2)
WORK = Workload(Geometric(60.0, 200), Fixed(0.4))
# A decode step takes 20 ms, and 1 ms more for each sequence.
RATES = Rates(EngineSpeed([(n, n / (0.02 + 0.001 * n)) for n in (1, 200)]), 900.0, publish_seconds=0.3)


def lines_of(rates=RATES, rules=RULES, split=Split(slots=200), takes=40):  # noqa: B008  # a constant
    return simulate(WORK, rates, split, rules, takes=takes).lines


@pytest.mark.parametrize("rules", [RULES, Rules(8, 4, 0, schedule="sync"), Rules(8, 4, 4, num_iterations=2)])
def test_the_rates_of_a_run_are_those_it_ran_at(rules):
    read = finished_run(lines_of(rules=rules))
    assert read.rates.training_tokens_per_second == pytest.approx(900.0)
    assert read.rates.publish_seconds == pytest.approx(0.3)
    assert read.work.reward_seconds.mean == pytest.approx(0.4)
    assert read.work.lengths.mean == pytest.approx(WORK.lengths.mean, rel=0.1)
    assert (read.rules, read.split) == (rules, Split(slots=200))
    for sequences in (10, 20, 30):
        expected = RATES.engine.tokens_per_second(sequences)
        assert read.rates.engine.tokens_per_second(sequences) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("schedule", ["sync", "periodic"])
def test_two_runs_with_other_micro_batches_forecast_a_periodic_one(schedule):
    """Also where one of the two is periodic itself."""
    rates = replace(RATES, micro_step_seconds=0.05, optimizer_step_seconds=0.3)
    large = Rules(8, 4, 0, schedule="sync")
    small = Rules(8, 4, 0, micro_steps_per_take=8, micro_steps_per_step=8, schedule="sync")
    periodic = Rules(1, 4, 0, 1, 1, 8, 8, schedule="periodic")
    runs = [finished_run(lines_of(rates, rules)) for rules in (large, small if schedule == "sync" else periodic)]
    truth = simulate(WORK, rates, Split(slots=200), periodic, takes=160, seed=7)
    made = forecast(runs[0].work, rates_of(runs), Split(slots=200), periodic)
    assert made.step_seconds == pytest.approx(truth.seconds / truth.steps, rel=0.05)
    assert rates_of(runs).micro_step_seconds == pytest.approx(0.05, rel=0.1)
    assert rates_of(runs).optimizer_step_seconds == pytest.approx(0.3, rel=0.1)


def test_sequences_that_wait_for_slots_and_those_that_were_not_finished_are_no_part_of_the_engines_speed():
    """With two more groups than there are slots for, a few stragglers, and the end of the run in the middle."""
    rates = Rates(EngineSpeed([(n, n / (0.004 + 0.0001 * n)) for n in (1, 200)]), 5000.0, publish_seconds=0.1)
    rules = Rules(8, 4, 2, max_in_flight=14)
    read = finished_run(lines_of(rates, rules, Split(slots=48), takes=25))
    for sequences in (16, 32, 48):
        expected = rates.engine.tokens_per_second(sequences)
        assert read.rates.engine.tokens_per_second(sequences) == pytest.approx(expected, rel=0.1)


def test_an_engine_that_idles_and_slows_down_with_each_sequence_has_a_speed():
    rates = Rates(EngineSpeed([(n, n / (0.02 * n)) for n in (1, 200)]), 200.0, publish_seconds=0.1)
    read = finished_run(lines_of(rates))
    assert read.rates.engine.tokens_per_second(16) == pytest.approx(50.0, rel=0.05)


def test_where_completions_wait_for_slots_the_engine_has_one_speed():
    read = finished_run(lines_of(split=Split(slots=8)))
    ((sequences, rate),) = read.rates.engine.points
    assert sequences == pytest.approx(8.0, rel=0.02)
    assert rate == pytest.approx(RATES.engine.tokens_per_second(8), rel=0.05)


def test_the_rates_are_those_of_one_trainer_and_one_engine():
    read = finished_run(lines_of(split=Split(trainers=2, engines=3, slots=64)))
    assert read.rates.training_tokens_per_second == pytest.approx(900.0)
    assert read.rates.engine.tokens_per_second(8) == pytest.approx(RATES.engine.tokens_per_second(8), rel=0.15)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_synchronous_run_forecasts_asynchronous_ones(max_staleness):
    read = finished_run(lines_of(rules=Rules(8, 4, 0, schedule="sync")))
    rules = Rules(8, 4, max_staleness)
    truth = simulate(WORK, RATES, Split(slots=200), rules, takes=80, seed=7)
    made = forecast(read.work, read.rates, Split(slots=200), rules)
    assert made.step_seconds == pytest.approx(truth.seconds / truth.steps, rel=0.08)


def test_a_run_that_is_too_short_is_refused():
    lines = lines_of()
    steps = [number for number, line in enumerate(lines) if line["kind"] == "step"]
    with pytest.raises(ValueError, match="has 2 optimizer steps after its first take"):
        finished_run(lines[: steps[2] + 1])


def test_a_timeline_of_an_earlier_version_is_refused_with_what_to_do():
    start, *lines = lines_of()
    with pytest.raises(ValueError, match="an earlier version wrote it: plan from a recipe"):
        finished_run([{name: value for name, value in start.items() if name != "rules"}, *lines])
