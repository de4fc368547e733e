"""`TakeClock` against a plain simulation of the Trainer's loop."""

import pytest

from trl_a3po.rollout.take_clock import TakeClock


def simulate(per_take, accumulation, per_epoch, max_steps):
    """Versions at which a loop like the Trainer's prepares the first micro-step of each generation batch."""
    takes, version, micro_step = [], 0, 0
    while version < max_steps:
        for step in range(per_epoch):
            if version >= max_steps:
                break
            if micro_step % per_take == 0:
                takes.append(version)
            micro_step += 1
            if (step + 1) % accumulation == 0 or step + 1 == per_epoch:
                version += 1
    return takes


@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
@pytest.mark.parametrize("per_take", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("takes_per_epoch", [1, 2, 5])
@pytest.mark.parametrize("max_steps", [1, 2, 7, 20])
def test_versions_of_takes_equal_those_of_the_training_loop(accumulation, per_take, takes_per_epoch, max_steps):
    per_epoch = per_take * takes_per_epoch
    expected = simulate(per_take, accumulation, per_epoch, max_steps)
    clock = TakeClock(per_take, accumulation, per_epoch, 0, max_steps)
    assert clock.total_takes == len(expected)
    assert [clock.version_of_take(n) for n in range(clock.total_takes)] == expected


def test_a_stream_without_epochs_counts_on():
    clock = TakeClock(4, 2, None, 3, 11)
    assert [clock.version_of_take(n) for n in range(clock.total_takes)] == [3, 5, 7, 9]


def test_a_run_that_is_over_has_no_takes():
    assert TakeClock(1, 1, 8, 5, 5).total_takes == 0
