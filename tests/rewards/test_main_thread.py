"""Reward functions that need the main thread of a process: they are noticed, and run in a process of their own."""

import _signal
import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from signal import signal as imported_signal

import pytest
from trl.rewards import accuracy_reward, get_cosine_scaled_reward

from tests.rewards.test_worker_pool import state
from trl_a3po.errors import RewardError
from trl_a3po.protocol.records import Group, Prompt, Rollout, Score
from trl_a3po.rewards.scorer import RewardScorer
from trl_a3po.rewards.watch import limits_time_in_main_thread_only, watch
from trl_a3po.rewards.worker_pool import RewardWorkers

SIGNAL_MODULE = {name: vars(signal)[name] for name in ("_signal", "signal", "alarm", "setitimer", "set_wakeup_fd")}
MAIN_THREAD = threading.main_thread


def group():
    rollouts = [Rollout([5, 6 + i], [-1.0, -2.0], [0, 0]) for i in range(2)]
    return Group(Prompt(0, {"prompt": "p", "solution": "$2$"}, [1, 2]), rollouts)


@pytest.fixture
def in_thread():
    """funcs -> a call that scores a group in a thread that is not the main thread."""
    scorers = []

    def build(*funcs, **settings):
        names = [f"reward{i}" for i in range(len(funcs))]

        def decode(group):
            return [[{"content": r"\boxed{2}"}]] * 2

        def own_process(column):
            return RewardWorkers(
                [funcs[column]], [names[column]], decode, state, workers=1, otherwise="use no signals", **settings
            )

        scorers.append(RewardScorer(funcs, names, decode, state, own_process=own_process))
        scorers[-1].start()
        with_thread = ThreadPoolExecutor(1)
        return lambda group: with_thread.submit(scorers[-1], group).result()

    yield build
    for scorer in scorers:
        scorer.interrupt()
        scorer.close()
    assert {name: vars(signal)[name] for name in SIGNAL_MODULE} == SIGNAL_MODULE
    assert SIGNAL_MODULE["_signal"] is _signal and threading.main_thread is MAIN_THREAD


def asks(how):
    """A check that limits its time, and where it was run."""

    def limited():
        import asyncio
        import os
        import signal

        match how:
            case "signal":
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
            case "alarm":
                signal.alarm(0)
            case "setitimer":
                signal.setitimer(signal.ITIMER_REAL, 0)
            case "loop":
                loop = asyncio.new_event_loop()
                loop.add_signal_handler(signal.SIGUSR1, print)
                loop.close()
        return float(os.getpid())

    return limited


def plain(check):
    return lambda completions, **kwargs: [check() for _ in completions]


def swallowing(check):
    def reward(completions, log_metric, log_extra, **kwargs):
        log_metric("called", 1)
        log_extra("seen", completions)
        try:
            return [check() for _ in completions]
        except Exception:
            return [0.0] * len(completions)

    return reward


def bare(check):
    def reward(completions, log_metric, log_extra, **kwargs):
        log_metric("called", 1)
        log_extra("seen", completions)
        try:
            return [check() for _ in completions]
        except:  # noqa: E722
            return [0.0] * len(completions)

    return reward


def lazy(check):
    return lambda completions, **kwargs: (check() for _ in completions)


def later(check):
    async def reward(completions, **kwargs):
        async def one():
            return check()

        try:
            return await asyncio.gather(*(one() for _ in completions))
        except:  # noqa: E722
            return [0.0] * len(completions)

    return reward


@pytest.mark.parametrize(
    "function, how",
    [
        (plain, "signal"), (swallowing, "signal"), (bare, "signal"), (lazy, "signal"), (later, "signal"),
        (swallowing, "alarm"), (bare, "setitimer"), (bare, "loop"),
    ],
)  # fmt: skip
def test_a_function_that_asks_for_a_signal_runs_in_a_process_and_nothing_of_its_try_is_kept(
    in_thread, caplog, function, how
):
    score = in_thread(function(asks(how)))
    first, second = score(group()), score(group())
    (pid,) = {row[0] for row in first.rewards + second.rewards}
    assert pid not in (0.0, float(os.getpid()))
    if function in (swallowing, bare):
        assert first.metrics == [("called", 1.0)] and len(first.extra_columns["seen"]) == 2
    told = [message for message in caplog.messages if "'reward0' asks for signal." in message]
    assert len(told) == 1 and "runs in a process of its own from now on" in told[0]


def test_the_other_functions_stay_in_the_thread_with_their_closures(in_thread):
    calls = []

    def counts(completions, **kwargs):
        calls.append(os.getpid())
        return [len(calls)] * len(completions)

    async def awaited(completions, **kwargs):
        return counts(completions)

    score = in_thread(counts, plain(asks("signal")), awaited)
    rewards = [score(group()).rewards[0] for _ in range(2)]
    assert [[first, last] for first, _, last in rewards] == [[1, 2], [3, 4]]
    assert calls == [os.getpid()] * 4 and rewards[0][1] == rewards[1][1] != os.getpid()


def test_a_function_that_cannot_be_pickled_is_an_error_that_says_what_to_do(in_thread):
    lock = threading.Lock()

    def locked(completions, **kwargs):
        with lock:
            imported_signal(signal.SIGALRM, signal.SIG_IGN)
        return [0.0] * len(completions)

    with pytest.raises(
        RewardError, match=r"'reward0' asks for signal.signal.*cannot be sent.*use no signals"
    ) as error:
        in_thread(locked)(group())
    assert "reward_workers=0" not in str(error.value)


@pytest.mark.parametrize(("timeout", "seconds"), [(None, 1.0), (9.0, 0.0)])
def test_the_start_of_a_functions_process_counts_towards_no_timeout(timeout, seconds):
    now, seen = [0.0], []

    class Process:
        def start(self):
            pass

        def wait_until_ready(self):
            now[0] += 100.0
            seen.append(scorer.seconds())

        def __call__(self, group):
            now[0] += 1.0
            seen.append(scorer.seconds())
            return Score([[0.0]] * 2)

    scorer = RewardScorer(
        [swallowing(asks("alarm"))], ["reward"], lambda group: ["c"] * 2, state,
        timeout=timeout, own_process=lambda column: Process(), clock=lambda: now[0],
    )  # fmt: skip
    assert scorer(group()).rewards == [[0.0]] * 2
    assert seen == [0.0, seconds]


def test_a_hanging_function_in_its_process_costs_its_group(in_thread):
    def hangs(completions, **kwargs):
        import time

        signal.alarm(0)
        time.sleep(3600)

    assert in_thread(hangs, timeout=0.5)(group()).reason == "reward timeout in 'reward0'"


@pytest.mark.parametrize("reward", [accuracy_reward, lambda **kwargs: accuracy_reward(**kwargs)])
def test_trls_accuracy_reward_has_its_time_limits(in_thread, caplog, reward):
    assert in_thread(reward)(group()).rewards == [[1.0], [1.0]]
    assert [message for message in caplog.messages if "asks for math-verify's time limits" in message]


def test_trls_rewards_that_limit_their_time_are_known():
    known = (accuracy_reward, partial(accuracy_reward, log_extra=None), get_cosine_scaled_reward(9))
    assert all(map(limits_time_in_main_thread_only, known)) and not limits_time_in_main_thread_only(len)


def test_the_main_thread_gets_the_real_functions_during_a_watch():
    inside, leave = threading.Event(), threading.Event()

    def watched():
        with watch() as seen:
            inside.set()
            leave.wait(20)
        return seen.noticed

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(watched)
        inside.wait(20)
        try:
            assert signal.alarm is not SIGNAL_MODULE["alarm"]
            before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
            assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
            signal.signal(signal.SIGALRM, before)
        finally:
            leave.set()
        assert result.result() == ""
    assert signal.alarm is SIGNAL_MODULE["alarm"]


def test_a_watch_that_is_ended_from_outside_leaves_nothing_behind():
    def hangs():
        with watch() as seen:
            seen.end()
            seen.end()
            assert vars(signal)["_signal"] is _signal and threading.main_thread is MAIN_THREAD
            with pytest.raises(ValueError, match="main thread"):
                signal.signal(signal.SIGALRM, signal.SIG_IGN)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hangs).result()
