"""The best split of GPUs, and the memory that decides which splits there are."""

import pytest

from trl_a3po.planning.best_split import best_splits, splits
from trl_a3po.planning.forecast import forecast
from trl_a3po.planning.rates import EngineSpeed, Rates
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulation import Split
from trl_a3po.planning.workload import Fixed, Workload

RULES = Rules(groups_per_take=12, num_generations=8, max_staleness=4)
WORK = Workload(Fixed(100))


def rates(engine, training):
    return Rates(EngineSpeed([(16, engine)]), training)


def test_every_trainer_gets_the_same_number_of_completions():
    assert [split.trainers for split in splits(8, 1, 64, RULES)] == [1, 2, 3, 4, 6]
    assert [(s.trainers, s.engines) for s in splits(8, 2, 64, RULES)] == [(2, 3), (4, 2), (6, 1)]


def test_gpus_that_cannot_be_shared_out_are_refused():
    with pytest.raises(ValueError, match="1 GPUs cannot be shared out"):
        splits(1, 1, 64, RULES)


@pytest.mark.parametrize(
    ("engine", "training", "trainers"), [(500.0, 1500.0, 2), (1500.0, 500.0, 6), (500.0, 500.0, 4)]
)
def test_the_slower_side_gets_more_gpus(engine, training, trainers):
    best = best_splits(WORK, rates(engine, training), RULES, splits(8, 1, 16, RULES))[0]
    assert best.split == Split(trainers, 8 - trainers, 16)
    assert best.step_seconds == pytest.approx(best.bound, rel=0.05)


def test_the_best_split_is_the_best_of_all():
    candidates, measured = splits(8, 1, 16, RULES), rates(900.0, 700.0)
    every = [forecast(WORK, measured, split, RULES).step_seconds for split in candidates]
    assert best_splits(WORK, measured, RULES, candidates)[0].step_seconds == pytest.approx(min(every))


def test_splits_that_do_not_fit_are_left_out():
    candidates, measured = splits(8, 1, 16, RULES), rates(900.0, 700.0)
    assert {
        made.split.trainers for made in best_splits(WORK, measured, RULES, candidates, lambda s: s.trainers > 4)
    } == {6}
    with pytest.raises(ValueError, match="No split fits into the memory"):
        best_splits(WORK, measured, RULES, candidates, lambda split: False)
