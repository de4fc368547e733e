"""The queue's decisions without threads: order, bound and outcomes over random runs, and the single rules."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.queue_fakes import make_prompts, make_rollout, zero_score
from trl_a3po.errors import EngineError, GenerationFailed, StallError, StampError
from trl_a3po.protocol.engine import GroupFailed, GroupFinished
from trl_a3po.protocol.records import Rejection
from trl_a3po.rollout.queue_core import QueueCore
from trl_a3po.rollout.take_plan import TakePlan, starves


def make_core(*, number=None, batch=2, bound=1, version_of_take=lambda take: take, takes=100, attempts=3, **kwargs):
    kwargs = {"max_in_flight": None, "max_rejected_in_a_row": 10**6} | kwargs
    core = QueueCore(
        prompts=make_prompts(number),
        plan=TakePlan(batch, bound, version_of_take, takes),
        num_rollouts=2,
        max_attempts=attempts,
        **kwargs,
    )
    core.prompts.fill(core.prompts_wanted)
    return core


def finish(core, request_id, versions=(0,)):
    core.engine_event(GroupFinished(request_id, [make_rollout(versions)] * 2))


def score_all(core):
    while (due := core.next_to_score()) is not None:
        core.record_score(due[0], zero_score(due[1]))


def ready_core(**kwargs):
    """A core whose admissible groups are all ready, and their request ids."""
    core = make_core(**kwargs)
    ids = [request.request_id for request in core.submissions()]
    for request_id in ids:
        finish(core, request_id)
    score_all(core)
    return core, ids


@dataclass(frozen=True)
class Run:
    seed: int
    batch: int
    bound: int
    steps: int  # optimizer steps a batch
    share: int  # takes that share a version, with one step a batch
    sync: int  # weight_sync_steps
    takes: int
    in_flight: int | None
    fail: float
    die: float
    reject: float
    rows: int | None
    pace: tuple[int, int, int] = (2, 2, 1)  # how often the engine, the reward function and the trainer act

    def version_of_take(self, take):
        return take * self.steps // self.share


@st.composite
def runs(draw):
    sync, steps = draw(st.sampled_from([1, 1, 1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2, 3]))
    bound = draw(st.integers(0, 5).filter(lambda bound: not starves(sync, steps, bound)))
    batch, takes = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    return Run(
        seed=draw(st.integers(0, 2**32)),
        batch=batch,
        bound=bound,
        steps=steps,
        share=draw(st.sampled_from([1, 1, 2, 3])) if steps == 1 else 1,
        sync=sync,
        takes=takes,
        in_flight=draw(st.sampled_from([None, None, 1, 3])),
        fail=draw(st.sampled_from([0.0, 0.1, 0.3])),
        die=draw(st.sampled_from([0.0, 0.02])),
        reject=draw(st.sampled_from([0.0, 0.1, 0.4])),
        rows=draw(st.sampled_from([None, None, None, batch * takes // 2, batch * takes + 2])),
        pace=draw(st.tuples(*[st.sampled_from([1, 4, 16])] * 3)),
    )


class Simulation:
    """A trainer, an engine and a reward function that act in random order on one core, and watch the invariants.

    What is outstanding, which versions were published and who was overtaken is counted here, not read from the core.
    """

    def __init__(self, run):
        self.run, self.random = run, random.Random(run.seed)
        self.attempts = []
        self.core = make_core(
            number=run.rows,
            batch=run.batch,
            bound=run.bound,
            version_of_take=run.version_of_take,
            takes=run.takes,
            attempts=10**6,
            max_in_flight=run.in_flight,
            attempt_ended=self.attempts.append,
        )
        self.published = self.engine_version = self.taken = 0
        self.waiting = []  # prompt indices, submission order
        self.in_engine = {}  # request_id -> (prompt index, version it was submitted at)
        self.scoring = None
        self.rejected, self.overtaken, self.trained = set(), set(), []

    def play(self):
        for _ in range(200_000):
            if self.core.end_reason is not None:
                break
            self.submit()
            self.random.choices([self.engine, self.reward, self.trainer], self.run.pace)[0]()
        else:
            raise AssertionError("the run never ended")
        self.core.close()
        return self

    def submit(self):
        for request in self.core.submissions():
            if request.noise_key not in self.waiting:
                self.check_admission()
                self.waiting.append(request.noise_key)
            self.in_engine[request.request_id] = (request.noise_key, self.published)

    def check_admission(self):
        expected = self.taken + len(self.waiting) // self.run.batch
        assert expected < self.run.takes
        assert self.run.version_of_take(expected) <= self.published + self.run.bound
        if self.run.in_flight is not None:
            assert len(self.in_engine) < self.run.in_flight

    def engine(self):
        if not self.in_engine:
            return
        if self.random.random() < self.run.die:
            lost, self.in_engine = list(self.in_engine), {}
            for request_id in lost:
                self.core.engine_event(GroupFailed(request_id, "the worker died"))
            return
        request_id = self.random.choice(list(self.in_engine))
        _, submitted = self.in_engine.pop(request_id)
        if self.random.random() < self.run.fail:
            self.core.engine_event(GroupFailed(request_id, "lost"))
        else:
            finish(
                self.core, request_id, sorted(self.random.randint(submitted, self.engine_version) for _ in range(3))
            )

    def reward(self):
        if self.scoring is None:
            self.scoring = self.core.next_to_score()
            return
        (request_id, group), self.scoring = self.scoring, None
        if self.random.random() < self.run.reject:
            self.core.record_score(request_id, Rejection("by chance"))
            self.rejected.add(group.prompt.index)
            self.waiting.remove(group.prompt.index)
        else:
            self.core.record_score(request_id, zero_score(group))

    def trainer(self):
        version = self.run.version_of_take(self.taken)
        due = version // self.run.sync * self.run.sync
        if due > self.engine_version:
            self.engine_version = due  # the engine's publish has begun: tokens may carry its version already
            return
        if due > self.published:
            self.published = due
            self.core.published(due)
        self.core.prompts.fill(self.core.prompts_wanted)
        groups = self.core.try_take(version)
        if groups is not None:
            self.check_batch(groups, version)

    def check_batch(self, groups, version):
        indices = [group.prompt.index for group in groups]
        places = [self.waiting.index(index) for index in indices]
        assert len(indices) == self.run.batch
        assert places == sorted(places)
        stamps = [stamp for group in groups for rollout in group.rollouts for stamp in rollout.versions]
        assert all(0 <= version - stamp <= self.run.bound for stamp in stamps)
        self.overtaken |= set(self.waiting[: places[-1]]) - set(indices)
        self.waiting = [index for index in self.waiting if index not in indices]
        self.trained += indices
        self.taken += 1


@settings(max_examples=1500, deadline=None)
@given(runs())
def test_invariants_1_to_4_hold_in_every_run(run):
    simulation = Simulation(run).play()
    outcomes = simulation.core.outcomes()
    assert len(set(simulation.trained)) == len(simulation.trained) == run.batch * simulation.taken
    assert outcomes.count("trained") == len(simulation.trained)
    assert outcomes.count("rejected") == len(simulation.rejected)
    assert outcomes.prompts == sum(outcomes.prompt_outcomes.values())
    assert outcomes.attempts == sum(outcomes.attempt_outcomes.values())
    assert outcomes.open_prompts == outcomes.open_attempts == 0
    assert "rejected: older than max_staleness" not in outcomes.prompt_outcomes
    if run.rows is None:  # then the run makes all its takes, and every prompt it began was of use
        assert simulation.taken == run.takes
        assert outcomes.count("unused") == 0
        assert simulation.overtaken <= set(simulation.trained) | simulation.rejected
    else:
        assert simulation.taken == min(run.takes, (run.rows - len(simulation.rejected)) // run.batch)


@settings(max_examples=300, deadline=None)
@given(runs())
def test_every_attempt_is_reported_once_with_its_outcome_and_its_times(run):
    simulation = Simulation(run).play()
    assert Counter(attempt.outcome for attempt in simulation.attempts) == simulation.core.outcomes().attempt_outcomes
    assert len({(attempt.prompt, attempt.attempt) for attempt in simulation.attempts}) == len(simulation.attempts)
    for attempt in simulation.attempts:
        times = [attempt.submitted, attempt.finished, attempt.scoring, attempt.scored, attempt.ended]
        reached = [moment for moment in times if moment is not None]
        assert reached == sorted(reached)
        assert None not in times or attempt.outcome != "trained"
        assert (attempt.taken_version is None) == (attempt.outcome != "trained")
        if attempt.outcome == "trained":
            assert 0 <= attempt.taken_version - attempt.submitted_version <= run.bound
            assert attempt.submitted_version <= attempt.oldest <= attempt.newest <= attempt.taken_version


def test_the_random_runs_overtake_stragglers_now_and_then():
    """Guards the test above against passing because nothing ever happens in it."""
    run = Run(7, 2, 3, 1, 1, 1, 200, 4, 0.1, 0.01, 0.1, None, pace=(4, 16, 16))
    simulation = Simulation(run).play()
    assert len(simulation.overtaken) > 20
    assert simulation.core.outcomes().count_attempts("failed") > 20


def test_a_straggler_a_hundred_times_slower_is_overtaken_and_trained_in_bound():
    """Time in ticks: prompt 0 takes a hundred, every other one; the trainer takes whenever it may."""
    core, started, taken_at, overtaken = make_core(bound=3, takes=8), {}, {}, False
    for tick in range(1000):
        started |= dict.fromkeys(core.submissions(), tick)
        for request in [r for r, begun in started.items() if tick - begun >= (100 if r.noise_key == 0 else 1)]:
            del started[request]
            finish(core, request.request_id, versions=[core.published_version])
        score_all(core)
        if core.end_reason is None:
            core.published(core.next_take)
            core.prompts.fill(core.prompts_wanted)
            for group in core.try_take(core.next_take) or []:
                taken_at[group.prompt.index] = core.next_take - 1
                overtaken |= 0 not in taken_at
    assert len(taken_at) == 16
    assert overtaken
    assert taken_at[0] == 3


def test_a_retry_keeps_its_place_and_its_noise_and_takes_the_new_version():
    core = make_core(batch=1, version_of_take=lambda take: take + 1, bound=2)
    first, second = core.submissions()
    finish(core, second.request_id)
    core.published(1)
    core.engine_event(GroupFailed(first.request_id, "lost"))
    retry = core.submissions()[0]
    finish(core, retry.request_id, versions=[1])
    score_all(core)
    group = core.try_take(1)[0]
    assert retry.noise_key == first.noise_key == group.prompt.index
    assert retry.request_id not in (first.request_id, second.request_id)
    assert (group.attempt, group.submitted_version) == (2, 1)


def test_a_prompt_that_keeps_failing_stops_the_run_with_every_reason():
    core = make_core(attempts=2)
    first = core.submissions()[0]
    core.engine_event(GroupFailed(first.request_id, "worker died"))
    retry = core.submissions()[0]
    with pytest.raises(GenerationFailed, match=r"Prompt 0 failed 2 times.*1: worker died; attempt 2: out of memory"):
        core.engine_event(GroupFailed(retry.request_id, "out of memory"))
    assert core.outcomes().prompt_outcomes == {"failed: out of memory": 1}


def test_a_rejected_group_is_replaced_at_the_end_of_the_order():
    core = make_core(batch=2, bound=0)
    first, second = core.submissions()
    finish(core, first.request_id)
    core.record_score(core.next_to_score()[0], Rejection("all rewards equal"))
    core.prompts.fill(core.prompts_wanted)
    (replacement,) = core.submissions()
    assert [item.prompt.index for item in core.order] == [second.noise_key, replacement.noise_key]


@pytest.mark.parametrize(
    "bound, replaces, in_reserve", [(0, False, 0), (0, True, 0), (2, False, 0), (2, True, 2)], ids=str
)
def test_no_more_rows_are_read_than_may_be_submitted_and_replace_what_is_rejected(bound, replaces, in_reserve):
    core = make_core(batch=2, bound=bound, replaces_groups=replaces, takes=4)
    admitted = 2 * (bound + 1)
    assert len(core.submissions()) == admitted and core.prompts.buffered == in_reserve
    core.next_take = 4  # nothing is left to train on
    assert core.prompts_wanted == in_reserve


def test_rejecting_everything_stops_the_run():
    core = make_core(max_rejected_in_a_row=3)
    with pytest.raises(StallError, match=r"4 groups in a row were rejected.*all rewards equal"):
        for _ in range(10):
            for request in core.submissions():
                finish(core, request.request_id)
            core.record_score(core.next_to_score()[0], Rejection("all rewards equal"))
            core.prompts.fill(core.prompts_wanted)


def test_a_group_too_old_for_its_take_is_rejected_and_replaced():
    core, _ = ready_core(batch=1, bound=1, version_of_take=lambda take: 5 * take)
    core.next_take = 1  # as if its take had been put off, which admission and take order never do
    core.published(5)
    assert core.try_take(5) is None
    assert core.outcomes().prompt_outcomes == {"rejected: older than max_staleness": 1}
    assert len(core.submissions()) == 1


def test_the_oldest_finished_group_is_scored_first():
    core = make_core()
    requests = core.submissions()
    for request in reversed(requests):
        finish(core, request.request_id)
    scored = [core.next_to_score()[1].prompt.index for _ in requests]
    assert scored == sorted(scored)


def test_a_token_older_than_its_submission_raises():
    core = make_core()
    core.published(1)
    request = core.submissions()[0]
    with pytest.raises(StampError, match="version 0, but version 1 was published before"):
        finish(core, request.request_id, versions=[1, 0])


def test_a_token_newer_than_the_trainer_raises_at_its_take():
    core = make_core(batch=1)
    request = core.submissions()[0]
    finish(core, request.request_id, versions=[0, 3])
    score_all(core)
    with pytest.raises(StampError, match="version 3, but the trainer is at version 0"):
        core.try_take(0)


def test_a_version_below_minus_one_raises():
    core = make_core()
    with pytest.raises(StampError, match="version -2"):
        finish(core, core.submissions()[0].request_id, versions=[-2])


def test_tokens_that_no_policy_sampled_have_no_age():
    core = make_core(batch=1, version_of_take=lambda take: 9, bound=5)
    core.published(4)
    finish(core, core.submissions()[0].request_id, versions=[4, -1, 7])
    score_all(core)
    core.published(9)
    (group,) = core.try_take(9)
    assert group.rollouts[0].versions == [4, -1, 7]
    assert group.rollouts[0].sampled_versions == [4, 7]


def test_an_event_for_an_unknown_request_raises():
    with pytest.raises(EngineError, match="request 5, which is not outstanding"):
        make_core().engine_event(GroupFailed(5, "lost"))


def test_an_incomplete_group_raises():
    core = make_core()
    request = core.submissions()[0]
    with pytest.raises(EngineError, match="returned 1 rollouts for prompt 0, but 2"):
        core.engine_event(GroupFinished(request.request_id, [make_rollout([0])]))


def test_a_take_later_than_promised_raises():
    core, _ = ready_core()
    with pytest.raises(ValueError, match=r"Take 0 happens at version 1, but version_of_take\(0\) is 0"):
        core.try_take(1)


def test_a_take_older_than_the_last_publish_raises():
    core, _ = ready_core(version_of_take=lambda take: take + 4, bound=4)
    core.published(3)
    with pytest.raises(ValueError, match="version 2, but version 3"):
        core.try_take(2)


def test_a_publish_cannot_go_back():
    core = make_core()
    core.published(2)
    with pytest.raises(ValueError, match="Version 1 was published after version 2"):
        core.published(1)


def test_prompts_that_cannot_complete_a_batch_are_kept_as_replacements():
    core = make_core(number=5, batch=2, bound=9)
    core.prompts.fill(100)
    assert len(core.submissions()) == 4
    assert core.admission() == "end of data"


def test_the_end_of_the_prompts_is_known_without_waiting_for_what_is_left():
    core = make_core(number=2, batch=3)
    core.prompts.fill(100)
    assert "2 are left for take 0, which needs 3" in core.end_reason


def test_closing_books_the_rest_as_unused_and_names_what_the_engine_still_has():
    core = make_core(batch=2, bound=0)
    first, second = core.submissions()
    finish(core, first.request_id)
    assert core.close() == [second.request_id]
    assert core.outcomes().prompt_outcomes == core.outcomes().attempt_outcomes == {"unused": 2}
    assert core.close() == []


def test_what_was_in_the_engine_since_a_time_is_sampled_again_at_its_place():
    now = [0.0]
    core = make_core(bound=1, clock=lambda: now[0])
    first, second, third, fourth = (request.request_id for request in core.submissions())
    finish(core, first)
    now[0] = 2.0
    finish(core, second)
    due = core.next_to_score(), core.next_to_score()
    assert core.sample_again(1.0, "a reason") == [third, fourth]
    core.record_score(first, zero_score(due[0][1]))
    core.record_score(second, zero_score(due[1][1]))  # given up meanwhile
    finish(core, third)  # as is this
    assert [item.stage for item in core.order] == ["ready", "to submit", "to submit", "to submit"]
    again = core.submissions()
    assert [request.noise_key for request in again] == [1, 2, 3]
    assert not {request.request_id for request in again} & {first, second, third, fourth}
    for request in again:
        finish(core, request.request_id)
    score_all(core)
    assert [group.prompt.index for group in core.try_take(0)] == [0, 1]
    assert core.outcomes().attempt_outcomes == {"unused: a reason": 3, "trained": 2}
    assert core.outcomes().open_attempts == 2


def test_an_attempt_that_was_given_up_is_no_failure():
    core = make_core(batch=1, bound=0, attempts=2)
    (request,) = core.submissions()
    core.sample_again(0.0, "a reason")
    (request,) = core.submissions()
    core.engine_event(GroupFailed(request.request_id, "first"))
    (request,) = core.submissions()
    with pytest.raises(GenerationFailed, match="failed 2 times"):
        core.engine_event(GroupFailed(request.request_id, "second"))
