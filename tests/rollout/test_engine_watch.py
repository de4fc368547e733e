"""What counts as progress of the engine while a take waits."""

from trl_a3po.protocol.engine import EngineStats
from trl_a3po.rollout.engine_watch import EngineWatch


def test_new_tokens_are_progress_and_no_tokens_are_none():
    watch = EngineWatch()
    assert watch.gets_on(EngineStats(tokens=5), 1, None)
    assert not watch.gets_on(EngineStats(tokens=5), 1, None)
    assert watch.gets_on(EngineStats(tokens=6), 1, None) and watch.tokens == 6


def test_more_tokens_than_the_groups_can_have_are_no_progress_until_the_next_event():
    watch = EngineWatch()
    assert watch.gets_on(EngineStats(tokens=100), 1, 100)
    assert not watch.gets_on(EngineStats(tokens=101), 1, 100)
    assert "101 tokens sampled since the last event, more than its groups can have (100)" in str(watch)
    assert watch.gets_on(EngineStats(tokens=150), 2, 100) and watch.tokens == 49


def test_the_tokens_of_groups_that_are_done_are_none_since_the_last_event():
    watch = EngineWatch()
    watch.gets_on(EngineStats(tokens=27), 1, 0)
    assert str(watch).startswith("0 tokens sampled since the last event;")
    assert not watch.gets_on(EngineStats(tokens=28), 1, 0)


def test_a_stopped_worker_is_waited_for():
    watch, stopped = EngineWatch(), EngineStats(is_stopped=True, trouble="its worker (process 7) is stopped")
    assert not watch.gets_on(EngineStats(), 1, None)
    assert all(watch.gets_on(stopped, 1, None) for _ in range(3))
    assert str(watch).endswith("requests waiting; its worker (process 7) is stopped")
