"""The queue with its threads and a fake engine: random runs, what stops it, and closing it from every state."""

import random
import signal
import threading
import time
import traceback
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.queue_fakes import FakeEngine, make_prompts, update, zero_score
from trl_a3po.errors import A3POError, EngineError, GenerationFailed, QueueClosed, RewardError, StallError
from trl_a3po.protocol.engine import EngineStats
from trl_a3po.protocol.records import Rejection
from trl_a3po.rollout.left_out import LeftOut
from trl_a3po.rollout.queue import EndOfData, GenerationQueue
from trl_a3po.rollout.take_plan import starves


@contextmanager
def running(engine=None, *, start=True, **kwargs):
    """A started queue over an endless prompt stream, closed in the end."""
    engine = engine or FakeEngine()
    defaults = {
        "prompts": make_prompts(),
        "score": zero_score,
        "groups_per_batch": 2,
        "num_rollouts": 2,
        "max_staleness": 1,
        "version_of_take": lambda take: take,
        "total_takes": 50,
        "stall_timeout": 30.0,
        "close_timeout": 10.0,
    }
    queue = GenerationQueue(engine=engine, **(defaults | kwargs))
    try:
        if start:
            queue.start(0)
        yield queue
    finally:
        engine.close()
        queue.close()


def train(queue, takes, *, steps=1, sync=1):
    """Publish when due and take, as a trainer would; the batches taken."""
    batches, published = [], 0
    for take in range(takes):
        version = take * steps
        if version // sync * sync > published:
            published = version // sync * sync
            queue.publish(update(published))
        batches.append(queue.take(version))
    return batches


def until(condition, limit=20.0):
    """Wait for another thread to get somewhere."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def in_thread(call):
    """Run `call` in a thread; the list holds what it raised once the thread has ended."""
    raised = []

    def run():
        try:
            call()
        except A3POError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def random_delay(seed, longest):
    draws = random.Random(seed)
    return lambda request: draws.random() * longest


# --- whole runs, with threads -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 16),
    bound=st.integers(0, 4),
    steps=st.integers(1, 3),
    sync=st.integers(1, 3),
    fail=st.sampled_from([0.0, 0.1]),
    dies=st.sampled_from([0.0, 0.05]),
    reject=st.sampled_from([0.0, 0.2]),
    in_flight=st.sampled_from([None, 3]),
)
def test_every_run_trains_each_prompt_once_and_in_bound(
    seed, batch, bound, steps, sync, fail, dies, reject, in_flight
):
    if starves(sync, steps, bound):
        bound = sync
    takes, draws = 6, random.Random(seed)
    engine = FakeEngine(
        delay=random_delay(seed, 0.002),
        fails=lambda request: "lost" if draws.random() < fail else None,
        dies=dies,
        seed=seed,
    )
    with running(
        engine,
        score=lambda group: Rejection("by chance") if draws.random() < reject else zero_score(group),
        groups_per_batch=batch,
        max_staleness=bound,
        version_of_take=lambda take: take * steps,
        total_takes=takes,
        max_attempts=10**6,
        max_in_flight=in_flight,
    ) as queue:
        batches = train(queue, takes, steps=steps, sync=sync)
        outcomes = queue.outcomes()
    for take, groups in enumerate(batches):
        stamps = [stamp for group in groups for rollout in group.rollouts for stamp in rollout.versions]
        assert len(groups) == batch
        assert all(0 <= take * steps - stamp <= bound for stamp in stamps)
    trained = [group.prompt.index for groups in batches for group in groups]
    assert len(set(trained)) == len(trained) == takes * batch
    assert outcomes.prompts == sum(outcomes.prompt_outcomes.values())
    assert outcomes.attempts == sum(outcomes.attempt_outcomes.values()) == len(engine.submitted)
    assert outcomes.count("unused") == outcomes.open_prompts == outcomes.open_attempts == 0


def test_a_long_run_goes_through_thousands_of_groups():
    engine = FakeEngine(delay=random_delay(3, 0.002), dies=0.001, seed=3)
    with running(engine, groups_per_batch=64, max_staleness=2, total_takes=60, max_attempts=100) as queue:
        batches = train(queue, 60)
        assert queue.outcomes().prompt_outcomes == {"trained": 60 * 64}
    assert all(
        0 <= take - stamp <= 2
        for take, groups in enumerate(batches)
        for group in groups
        for rollout in group.rollouts
        for stamp in rollout.versions
    )


def test_a_straggler_a_hundred_times_slower_is_trained_in_bound():
    with running(
        FakeEngine(delay=lambda request: 0.2 if request.noise_key == 0 else 0.002), max_staleness=3, total_takes=8
    ) as queue:
        batches = train(queue, 8)
    (taken_at,) = [take for take, groups in enumerate(batches) if 0 in [group.prompt.index for group in groups]]
    assert taken_at <= 3


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_outstanding_with_the_batch_in_training_never_exceeds_the_bound(bound):
    batch, most = 3, 3 * bound
    with running(FakeEngine(), groups_per_batch=batch, max_staleness=bound, total_takes=50) as queue:
        for take in range(10):
            if take:
                queue.publish(update(take))
            queue.take(take)
            until(lambda: queue.status().ready == most)
            until(lambda: "waiting for a publish" in queue.status().producer)
            assert queue.status().outstanding + batch == (bound + 1) * batch
            assert queue.outcomes().prompts == (take + 1 + bound) * batch


def test_no_staleness_submits_each_batch_after_its_publish():
    engine = FakeEngine()
    with running(engine, max_staleness=0) as queue:
        train(queue, 5)
    assert [version for _, version in engine.submitted] == [take for take in range(5) for _ in range(2)]


def test_no_more_groups_are_in_the_engine_than_max_in_flight():
    engine, seen = FakeEngine(delay=lambda request: 0.001), []
    submit = engine.submit
    engine.submit = lambda requests: (submit(requests), seen.append(engine.stats().waiting_requests))
    with running(engine, max_in_flight=2, groups_per_batch=4, max_staleness=2) as queue:
        train(queue, 5)
    assert max(seen) == 2


def test_nothing_is_sampled_beyond_the_last_take():
    engine = FakeEngine()
    with running(engine, total_takes=3, max_staleness=40) as queue:
        train(queue, 3)
        with pytest.raises(EndOfData, match="All 3 takes"):
            queue.take(3)
    assert len(engine.submitted) == 6


def test_the_end_of_the_prompts_is_an_end_and_not_a_wait():
    with running(prompts=make_prompts(5)) as queue:
        train(queue, 2)
        queue.publish(update(2))
        with pytest.raises(EndOfData, match=r"The prompts ended after 5: 1 are left for take 2, which needs 2\.$"):
            queue.take(2)


def test_where_the_prompts_end_the_rows_that_were_left_out_are_counted():
    prompts = make_prompts(5, tokenize=lambda row: LeftOut("too long", "") if row["number"] % 2 else [1])
    with running(prompts=prompts) as queue:
        train(queue, 1)
        queue.publish(update(1))
        with pytest.raises(EndOfData, match=r"which needs 2\. Rows left out: 2 too long\.$"):
            queue.take(1)


def test_prompts_are_tokenised_only_by_the_thread_that_takes():
    threads = set()

    def tokenize(row):
        threads.add(threading.current_thread())
        return [1]

    rejecting = random.Random(0)
    with running(
        prompts=make_prompts(tokenize=tokenize),
        score=lambda group: Rejection("by chance") if rejecting.random() < 0.8 else zero_score(group),
        max_rejected_in_a_row=10**6,
    ) as queue:
        train(queue, 5)
    assert threads == {threading.current_thread()}


def test_groups_are_scored_one_at_a_time_by_one_thread():
    threads, active, most = set(), [], []

    def score(group):
        threads.add(threading.current_thread().name)
        active.append(group)
        most.append(len(active))
        time.sleep(0.0005)
        active.remove(group)
        return zero_score(group)

    with running(score=score, groups_per_batch=8) as queue:
        train(queue, 4)
    assert (threads, max(most)) == ({"a3po reward thread"}, 1)


def test_publish_reaches_the_engine_without_the_queue_s_lock():
    engine = FakeEngine()
    with running(engine) as queue:
        looked = []

        def publish(published):
            thread, _ = in_thread(lambda: looked.append(queue.status().published_version))
            thread.join(20)
            engine.version = published.version

        engine.publish = publish
        queue.publish(update(1))
        assert (looked, queue.status().published_version) == ([0], 1)


# --- what stops it ------------------------------------------------------------------------------------------------


def broken_reward(group):
    raise KeyError("answer")


def test_a_reward_function_s_exception_is_raised_by_take_with_its_cause():
    with running(score=broken_reward) as queue:
        for _ in range(2):
            with pytest.raises(RewardError, match="prompt 0 raised KeyError: 'answer'") as info:
                queue.take(0)
            assert isinstance(info.value.__cause__, KeyError)
            assert "in broken_reward" in "".join(traceback.format_exception(info.value))


def test_a_reward_function_that_exits_does_not_end_its_thread_in_silence():
    def leave(group):
        raise SystemExit(3)

    with running(score=leave) as queue, pytest.raises(RewardError, match="prompt 0 raised SystemExit: 3"):
        queue.take(0)


def test_a_score_of_another_type_is_an_error():
    with running(score=lambda group: 1.0) as queue, pytest.raises(RewardError, match="returned a float"):
        queue.take(0)


def test_an_engine_error_is_raised_by_take_and_publish_with_its_cause():
    engine = FakeEngine()
    engine.error = EngineError("no memory left")
    with running(engine) as queue:
        for call in (lambda: queue.take(0), lambda: queue.publish(update(1))):
            with pytest.raises(EngineError, match="no memory left") as info:
                call()
            assert info.value.__cause__ is engine.error


def test_an_engine_that_dies_while_idle_is_noticed():
    engine = FakeEngine()
    with running(engine) as queue:
        until(lambda: queue.status().ready == 4)
        engine.error = EngineError("no memory left")
        until(lambda: "no memory left" in queue.status().producer)


def test_an_unexpected_exception_of_the_engine_keeps_its_cause():
    engine = FakeEngine()
    engine.submit = lambda requests: 1 / 0
    with running(engine) as queue, pytest.raises(EngineError, match="rollout thread stopped: ZeroDivision") as info:
        queue.take(0)
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_a_prompt_that_keeps_failing_is_named():
    engine = FakeEngine(fails=lambda request: "too long" if request.noise_key == 1 else None)
    with running(engine, max_attempts=2) as queue:
        with pytest.raises(GenerationFailed, match=r"Prompt 1 failed 2 times.*attempt 2: too long"):
            train(queue, 3)
        queue.close()
        outcomes = queue.outcomes()
        assert outcomes.prompt_outcomes["failed: too long"] == 1
        assert outcomes.prompts == sum(outcomes.prompt_outcomes.values())


def test_an_empty_prompt_is_raised_on_the_calling_thread():
    prompts = make_prompts(tokenize=lambda row: [] if row["number"] == 9 else [1])
    with running(prompts=prompts) as queue, pytest.raises(ValueError, match="Row 9"):
        train(queue, 5)


def test_rejecting_everything_ends():
    with running(score=lambda group: Rejection("too easy")) as queue, pytest.raises(StallError, match="too easy"):
        queue.take(0)


def test_settings_that_starve_a_take_say_so_at_once():
    with running(max_staleness=1) as queue:
        queue.take(0)
        queue.take(1)
        with pytest.raises(StallError, match=r"published version is 0 and max_staleness=1.*lower weight_sync_steps"):
            queue.take(2)


def test_a_stall_names_the_prompt_the_versions_and_the_stacks():
    engine = FakeEngine(delay=lambda request: 3600.0 if request.noise_key == 0 else 0.0)
    with running(engine, stall_timeout=1.0, max_staleness=0) as queue, pytest.raises(StallError) as info:
        queue.take(0)
    report = str(info.value)
    assert "take 0 waits for 1 of its 2 groups" in report
    assert "oldest prompt: prompt 0" in report and "attempt 1, in the engine for" in report
    assert "published 0; next take 0, at version 0" in report
    assert "stack of a3po rollout thread" in report and "stack of MainThread" in report


def test_a_stall_in_the_reward_function_says_so():
    release = threading.Event()
    with running(score=lambda group: release.wait(20) and zero_score(group), stall_timeout=1.0) as queue:
        with pytest.raises(StallError, match="being scored for"):
            queue.take(0)
        release.set()


def test_the_wait_for_a_deadline_says_why():
    engine = FakeEngine(delay=lambda request: 3600.0 if request.noise_key == 0 else 0.0)
    with running(engine, stall_timeout=1.0, max_staleness=1) as queue:
        assert [group.prompt.index for group in queue.take(0)] == [1, 2]
        queue.publish(update(1))
        with pytest.raises(
            StallError, match=r"take 1 waits for prompt 0 .*may not be overtaken.*submitted at version 0"
        ):
            queue.take(1)


def test_the_wait_of_a_take_is_counted_while_it_lasts():
    with running(FakeEngine(delay=lambda request: 3600.0)) as queue:
        thread, _ = in_thread(lambda: queue.take(0))
        until(lambda: queue.status().take_seconds > 0.1)
        queue.close()
        thread.join(20)
        assert queue.status().take_seconds > 0.1


def test_the_time_the_bound_keeps_prompts_back_is_counted():
    with running(max_staleness=0) as queue:
        until(lambda: queue.status().staleness_blocked_seconds > 0.05)


def test_take_before_start_is_refused():
    with running(start=False) as queue, pytest.raises(RuntimeError, match="before start"):
        queue.take(0)


def test_an_impossible_setting_is_named():
    with pytest.raises(ValueError, match="max_attempts is 0"), running(max_attempts=0):
        pass


# --- close --------------------------------------------------------------------------------------------------------


def assert_closed(queue):
    queue.close()
    outcomes = queue.outcomes()
    assert outcomes.open_prompts == outcomes.open_attempts == 0
    assert outcomes.prompts == sum(outcomes.prompt_outcomes.values())
    with pytest.raises(A3POError):
        queue.take(0)


def test_close_without_start():
    with running(start=False) as queue:
        queue.close()
        queue.close()
        with pytest.raises(QueueClosed):
            queue.start(0)


def test_close_while_idle_ends_both_threads():
    with running() as queue:
        until(lambda: queue.status().ready == 4)
        assert_closed(queue)
        assert not any(thread.is_alive() for thread in queue._threads)
        assert queue.outcomes().prompt_outcomes == {"unused": 4}


def test_close_cancels_what_is_in_the_engine():
    engine = FakeEngine(delay=lambda request: 3600.0)
    with running(engine) as queue:
        until(lambda: len(engine.submitted) == 4)
        assert_closed(queue)
        assert sorted(engine.cancelled) == [0, 1, 2, 3]


def test_close_wakes_a_take_that_waits_in_another_thread():
    with running(FakeEngine(delay=lambda request: 3600.0)) as queue:
        thread, raised = in_thread(lambda: queue.take(0))
        until(lambda: queue.status().take_seconds > 0)
        assert_closed(queue)
        thread.join(20)
        assert [type(error) for error in raised] == [QueueClosed]


def test_close_after_an_error():
    with running(score=broken_reward) as queue:
        with pytest.raises(RewardError):
            queue.take(0)
        assert_closed(queue)


def test_close_abandons_a_hanging_engine_with_a_warning_and_ignores_its_events(caplog):
    engine = FakeEngine()
    engine.hangs.set()
    with running(engine, close_timeout=0.1) as queue:
        assert engine.hanging.wait(20)
        assert_closed(queue)
        assert "a3po rollout thread did not end within 0.1 s" in caplog.text
        engine.close()
        until(lambda: not any(thread.is_alive() for thread in queue._threads))
        assert "failed while stopping" not in caplog.text


def test_close_abandons_a_hanging_reward_function_with_a_warning_and_ignores_its_result(caplog):
    release, entered = threading.Event(), threading.Event()

    def score(group):
        entered.set()
        release.wait(20)
        return zero_score(group)

    with running(score=score, close_timeout=0.1) as queue:
        assert entered.wait(20)
        assert_closed(queue)
        assert "a3po reward thread did not end" in caplog.text
        before = queue.outcomes()
        release.set()
        until(lambda: not any(thread.is_alive() for thread in queue._threads))
        assert queue.outcomes() == before


def test_close_from_a_reward_function_does_not_wait_for_itself():
    queues = []

    def score(group):
        queues[0].close()
        return zero_score(group)

    with running(start=False, score=score) as queue:
        queues.append(queue)
        queue.start(0)
        with pytest.raises(QueueClosed):
            queue.take(0)


def test_close_after_an_interrupt_of_a_take_that_waits():
    main = threading.get_ident()
    with running(FakeEngine(delay=lambda request: 3600.0)) as queue:

        def interrupt():
            until(lambda: queue.status().take_seconds > 0.05)
            signal.pthread_kill(main, signal.SIGINT)

        in_thread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            queue.take(0)
        assert_closed(queue)


def test_close_after_an_interrupt_of_the_tokenizer():
    def interrupt(row):
        if row["number"] == 9:
            raise KeyboardInterrupt
        return [1]

    with running(prompts=make_prompts(tokenize=interrupt)) as queue:
        with pytest.raises(KeyboardInterrupt):
            train(queue, 5)
        assert_closed(queue)


class OneLongGroup(FakeEngine):
    """Samples `tokens_each` tokens at every look at its numbers, and finishes nothing before it has `enough`."""

    def __init__(self, tokens_each, enough, **stats):
        super().__init__()
        self.tokens, self.tokens_each, self.enough, self.more = 0, tokens_each, enough, stats

    def wait(self, timeout):
        if self.tokens < self.enough:
            time.sleep(timeout)
            return []
        return super().wait(timeout)

    def stats(self):
        self.tokens += self.tokens_each
        return EngineStats(tokens=self.tokens, **self.more)


def test_an_engine_that_samples_is_not_stalled_however_long_its_group_is():
    with running(OneLongGroup(100, 700), stall_timeout=1.0, max_staleness=0) as queue:
        assert len(queue.take(0)) == 2


def test_an_engine_that_samples_more_than_its_groups_can_have_is_stalled():
    engine = OneLongGroup(100, 10**9, trouble="its worker (process 7) has said nothing for 31 s")
    with (
        running(engine, stall_timeout=1.0, max_staleness=0, max_tokens=50) as queue,
        pytest.raises(StallError) as info,
    ):
        queue.take(0)
    assert "more than its groups can have (200)" in str(info.value)
    assert "its worker (process 7) has said nothing for 31 s" in str(info.value)
    assert "oldest prompt: prompt 0" in str(info.value)


def test_a_worker_that_is_stopped_is_waited_for():
    engine = OneLongGroup(0, 1, is_stopped=True)
    threading.Timer(2.5, lambda: setattr(engine, "enough", 0)).start()
    with running(engine, stall_timeout=1.0, max_staleness=0) as queue:
        assert len(queue.take(0)) == 2


def test_the_start_of_a_reward_worker_is_no_stall():
    now, started = [0.0], threading.Event()

    def score(group):
        assert started.wait(60)
        return zero_score(group)

    def starts():
        if started.is_set():
            return False
        now[0] += 100.0
        started.set()
        return True

    with running(score=score, scoring_starts=starts, running=lambda: now[0], max_staleness=0) as queue:
        assert len(queue.take(0)) == 2
