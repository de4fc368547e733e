"""How the queue has groups scored: several at a time, with a limit, interrupted by close, and changed on the way."""

import threading
import time

import pytest

from tests.rollout.queue_fakes import make_rollout, zero_score
from tests.rollout.test_queue import running, train, until
from trl_a3po.errors import RewardError, StallError
from trl_a3po.protocol.records import Group, Score


def test_several_threads_score_as_many_groups_at_once():
    together = threading.Barrier(3)

    def score(group):
        together.wait(20)  # ends only when three groups are being scored
        return zero_score(group)

    with running(score=score, score_threads=3, groups_per_batch=3, max_staleness=0) as queue:
        batches = train(queue, 4)
    assert [[group.prompt.index for group in batch] for batch in batches] == [
        [3 * take, 3 * take + 1, 3 * take + 2] for take in range(4)
    ]


def test_an_overdue_score_ends_the_wait_with_the_setting_that_would_have_helped():
    release = threading.Event()
    with running(score=lambda group: release.wait(20) and zero_score(group), score_timeout=0.3) as queue:
        with pytest.raises(
            StallError, match=r"longer than reward_timeout=0.3 s.* Set reward_workers=1 or more"
        ) as info:
            queue.take(0)
        release.set()
    assert "being scored for" in str(info.value) and "stack of a3po reward thread" in str(info.value)


def test_scores_within_their_limit_are_no_stall_however_many_there_are():
    def score(group):
        time.sleep(0.05)
        return zero_score(group)

    with running(score=score, score_timeout=20.0, groups_per_batch=4) as queue:
        assert len(train(queue, 3)) == 3


def test_close_interrupts_scores_and_their_errors_are_nobodys(caplog):
    interrupted = threading.Event()

    def score(group):
        interrupted.wait(60)
        raise RewardError("interrupted")

    with running(score=score, interrupt_score=interrupted.set) as queue:
        until(lambda: "being scored" in queue.status().oldest)
        queue.close()
        assert not any(thread.is_alive() for thread in queue._threads)
    assert not caplog.records and queue.outcomes().count("unused") > 0


def test_a_score_may_be_another_group_to_train_on():
    def score(group):
        return Group(group.prompt, [make_rollout([0]), make_rollout([0, 0])], Score([[1.0], [2.0]]))

    with running(score=score, max_staleness=0) as queue:
        [group, _] = queue.take(0)
    assert [len(rollout.token_ids) for rollout in group.rollouts] == [1, 2]
    assert group.score.rewards == [[1.0], [2.0]]
