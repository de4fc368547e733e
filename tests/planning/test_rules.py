"""The numbers that follow from a run's settings, counted by hand."""

import pytest

from trl_a3po import A3POConfig
from trl_a3po.planning.rules import Rules, groups_that_fill


@pytest.mark.parametrize(
    ("per_take", "per_step", "takes_per_generation", "cycle"),
    [(1, 1, 1, 1), (4, 2, 1, 1), (2, 3, 1, 3), (2, 3, 2, 6), (1, 4, 4, 4), (1, 4, 2, 4)],
)
def test_a_cycle_ends_where_a_generation_batch_and_an_optimizer_step_end_together(
    per_take, per_step, takes_per_generation, cycle
):
    rules = Rules(
        2,
        4,
        1,
        micro_steps_per_take=per_take,
        micro_steps_per_step=per_step,
        takes_per_generation=takes_per_generation,
    )
    ends = [
        take
        for take in range(1, 20)
        if take * per_take % per_step == 0 and take % takes_per_generation == 0  # both end with this take
    ]
    assert rules.takes_in_cycle == ends[0] == cycle


@pytest.mark.parametrize(("slots", "generations", "groups"), [(8, 4, 4), (9, 4, 5), (1, 4, 3)])
def test_the_engine_has_two_groups_more_than_fill_its_slots(slots, generations, groups):
    assert groups_that_fill(slots, generations) == groups


def test_without_reward_workers_one_thread_scores(tmp_path):
    def rules(workers):
        return Rules.of_config(A3POConfig(output_dir=str(tmp_path), use_cpu=True, reward_workers=workers), None)

    assert [rules(workers).reward_workers for workers in (0, 1, 3)] == [1, 1, 3]
