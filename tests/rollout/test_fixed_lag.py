"""`lag`: what is sampled when is a formula, whatever the order in which engine, reward and trainer get on."""

import random
import time

import pytest

from tests.rollout.queue_fakes import make_prompts, make_rollout, update, zero_score
from trl_a3po.errors import GenerationFailed, StallError, StampError
from trl_a3po.protocol.engine import GroupFailed, GroupFinished
from trl_a3po.protocol.records import Rejection
from trl_a3po.rollout.queue import GenerationQueue
from trl_a3po.rollout.queue_core import QueueCore
from trl_a3po.rollout.take_plan import TakePlan
from trl_a3po.rollout.wait_reasons import starvation_reason
from trl_a3po.testing import StubEngine

BATCH, TAKES = 3, 9
PACES = [
    (1, 1, 1, 1),
    (9, 1, 1, 1),
    (1, 9, 1, 1),
    (1, 1, 9, 1),
    (1, 1, 1, 9),
    (9, 9, 1, 1),
    (1, 1, 9, 9),
    (1, 9, 9, 9),
]


def make_core(steps=1, lag=1, takes=TAKES, rows=None):
    core = QueueCore(
        prompts=make_prompts(rows),
        plan=TakePlan(BATCH, steps * lag, lambda take: take * steps, takes, lag),
        num_rollouts=2,
        max_attempts=10**6,
        max_in_flight=None,
        max_rejected_in_a_row=0,
    )
    core.published(0)
    core.prompts.fill(core.prompts_wanted)
    return core


class Run:
    """A rollout thread, an engine, a reward function and a trainer that act in an order drawn from `seed`."""

    def __init__(self, core, seed, pace=(1, 1, 1, 1), fail=0.0):
        self.core, self.random, self.fail = core, random.Random(seed), fail
        self.messages, self.retries, self.publishes, self.taken, self.scored = [], [], [0], [], []
        self.in_engine, self.tried, self.scoring = [], set(), None
        for _ in range(100_000):
            if core.end_reason is not None:
                return
            self.random.choices([self.submit, self.engine, self.reward, self.trainer], pace)[0]()
        raise AssertionError("the run never ended")

    def submit(self):
        requests = self.core.submissions()
        keys = [request.noise_key for request in requests]
        if new := [key for key in keys if key not in self.tried]:
            assert not self.in_engine and new == keys  # a batch alone, as one message
            self.messages.append((self.core.published_version, new))
        elif keys:
            self.retries.append((self.core.published_version, keys))
        self.tried |= set(keys)
        self.in_engine += requests

    def engine(self):
        if self.in_engine:
            request = self.in_engine.pop(self.random.randrange(len(self.in_engine)))
            if self.random.random() < self.fail:
                self.core.engine_event(GroupFailed(request.request_id, "lost"))
            else:
                rollouts = [make_rollout([self.core.published_version])] * 2
                self.core.engine_event(GroupFinished(request.request_id, rollouts))

    def reward(self):
        if self.scoring is None:
            self.scoring = self.core.next_to_score()
            return
        (request_id, group), self.scoring = self.scoring, None
        self.scored.append(group.prompt.index)
        self.core.record_score(request_id, zero_score(group))

    def trainer(self):
        version = self.core.plan.version_of_take(self.core.next_take)
        self.core.prompts.fill(self.core.prompts_wanted)
        if version > self.core.published_version:
            if not self.core.settled:
                return
            self.core.published(version)
            self.publishes.append(version)
            return
        groups = self.core.try_take(version)
        if groups is not None:
            stamps = {v for group in groups for rollout in group.rollouts for v in rollout.versions}
            self.taken.append((version, stamps, [group.prompt.index for group in groups]))


@pytest.mark.parametrize("steps, lag", [(1, 0), (1, 1), (1, 2), (1, 4), (1, 20), (2, 0), (2, 1), (2, 3), (3, 2)])
def test_submits_publishes_takes_and_scores_are_the_formula_in_any_order_of_events(steps, lag):
    batches = [[BATCH * n + i for i in range(BATCH)] for n in range(TAKES)]
    ages = [max(0, n * steps - lag * steps) for n in range(TAKES)]
    for seed, pace in enumerate(PACES * 3):
        run = Run(make_core(steps, lag), seed, pace)
        assert run.messages == list(zip(ages, batches, strict=True))
        assert run.publishes == [n * steps for n in range(TAKES)]
        assert run.taken == [(n * steps, {ages[n]}, batches[n]) for n in range(TAKES)]
        assert run.scored == list(range(BATCH * TAKES))


def test_what_the_engine_lost_is_sampled_again_from_the_same_version():
    retries = 0
    for seed in range(20):
        run = Run(make_core(lag=2), seed, fail=0.3)
        assert run.messages == [(max(0, n - 2), [BATCH * n + i for i in range(BATCH)]) for n in range(TAKES)]
        assert all(version == max(0, key // BATCH - 2) for version, keys in run.retries for key in keys)
        retries += len(run.retries)
    assert retries > 20


def test_a_run_whose_prompts_end_takes_its_whole_batches():
    run = Run(make_core(lag=2, rows=4 * BATCH + 1), 0)
    assert len(run.messages) == len(run.taken) == 4


def sampled_batch(**settings):
    core = make_core(**settings)
    for request in core.submissions():
        core.engine_event(GroupFinished(request.request_id, [make_rollout([0])] * 2))
    return core


def test_a_publish_while_a_batch_is_sampled_raises():
    core = make_core(lag=1)
    core.submissions()
    assert not core.settled
    with pytest.raises(ValueError, match="Version 1 was published while groups of version 0 were being sampled"):
        core.published(1)


def test_a_token_of_another_version_raises():
    core = make_core(lag=1)
    request = core.submissions()[0]
    with pytest.raises(StampError, match="version 1, but nothing newer than version 0"):
        core.engine_event(GroupFinished(request.request_id, [make_rollout([0, 1])] * 2))


def test_a_rejected_group_raises():
    core = sampled_batch()
    request_id, _ = core.next_to_score()
    with pytest.raises(GenerationFailed, match="schedule='fixed_lag' cannot replace it"):
        core.record_score(request_id, Rejection("too short"))


def test_a_take_whose_version_was_passed_over_raises():
    """The batch of take 2 belongs to version 1."""
    core = sampled_batch(lag=1, takes=3)  # take 0's
    for request in core.submissions():  # take 1's
        core.engine_event(GroupFinished(request.request_id, [make_rollout([0])] * 2))
    while (due := core.next_to_score()) is not None:
        core.record_score(due[0], zero_score(due[1]))
    for _ in range(2):
        assert starvation_reason(core) is None
        core.try_take(core.next_take)
    core.published(2)
    core.prompts.fill(core.prompts_wanted)
    assert core.submissions() == []
    assert "Take 2 needs groups of version 1" in starvation_reason(core)


def test_a_publish_that_waits_for_an_engine_which_never_answers_raises():
    class Silent(StubEngine):
        def submit(self, requests):
            pass

        def wait(self, timeout):
            time.sleep(min(timeout, 0.01))
            return []

    queue = GenerationQueue(
        engine=Silent(lambda prompt_ids, number: [1]),
        prompts=make_prompts(),
        score=zero_score,
        groups_per_batch=2,
        num_rollouts=2,
        max_staleness=1,
        version_of_take=lambda take: take,
        total_takes=5,
        lag=1,
        stall_timeout=0.3,
    )
    with queue:
        queue.start(0)
        with pytest.raises(StallError, match="it samples one batch at a time"):
            queue.publish(update(1))
