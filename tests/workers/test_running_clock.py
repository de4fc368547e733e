"""Time in which a process is stopped does not count."""

import threading

from trl_a3po.workers.running_clock import RunningClock, wait_running


def test_intervals_count_in_full_up_to_the_longest_that_a_running_process_has():
    times = iter([100.0, 101.0, 102.5, 3702.5, 3703.0])
    clock = RunningClock(longest=2.0, clock=lambda: next(times))
    assert [clock() for _ in range(4)] == [1.0, 2.5, 4.5, 5.0]


def test_a_wait_ends_with_the_event_or_at_its_timeout():
    condition = threading.Condition()
    with condition:
        assert wait_running(condition, lambda: True, 0.0)
        assert not wait_running(condition, lambda: False, 0.05)


def test_a_wait_is_not_over_while_the_process_that_is_waited_for_is_stopped():
    condition, looks = threading.Condition(), []

    def is_stopped():
        looks.append(1)
        return len(looks) < 5

    with condition:
        assert not wait_running(condition, lambda: False, 0.05, is_stopped)
    assert len(looks) == 5
