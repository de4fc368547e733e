"""Tools and environments that fail: each with a stated outcome, every instance closed exactly once."""

import asyncio
import os
import signal
import subprocess
import threading
import time

import pytest

from tests.episodes.chat import call, results_in, said
from tests.episodes.playing import ScriptedEngine, group, played, rollouts_of, tool_runner
from tests.workers.processes import until
from trl_a3po.protocol.engine import GroupFailed, GroupFinished


class Instances:
    """Makes environments of `kind`, and counts how often each was closed."""

    def __init__(self, kind):
        self.kind = kind
        self.made = []

    def __call__(self):
        environment = self.kind()
        environment.closes = 0
        self.made.append(environment)
        return environment

    @property
    def closes(self):
        return [environment.closes for environment in self.made]


class Plain:
    def reset(self, **row):
        self.calls = 0

    def tool(self, **arguments):
        self.calls += 1
        return self.calls

    def get_reward(self):
        return float(self.calls)

    def close(self):
        self.closes += 1


def one_call(name="tool", **arguments):
    return ScriptedEngine(lambda ids, number: said("end" if results_in(ids) else call(name, **arguments)))


@pytest.fixture
def running():
    runners = []

    def make(*args, **options):
        made = tool_runner(*args, **options)
        runners.append(made[0])
        return made

    yield make
    for runner in runners:
        runner.close()


def raises():
    raise RuntimeError("no luck")


def hangs():
    threading.Event().wait(600)


async def hangs_later():
    await asyncio.sleep(600)


def megabytes():
    return "x" * 10_000_000


def number():
    return 42


class Unprintable:
    def __str__(self):
        raise ValueError("no text")


def unprintable():
    return Unprintable()


def exits():
    raise SystemExit(1)


async def exits_later():
    raise SystemExit(1)


def surrogate():
    return "a\ud800b"  # as json.loads reads it from a string of the policy


async def later():
    return "later"


for function in (raises, hangs, hangs_later, megabytes, number, unprintable, surrogate, exits, exits_later, later):
    function.__doc__ = "Does something."  # which a tool needs


OUTCOMES = {  # tool -> (what the policy reads, failures, timeouts, end)
    raises: ("{'error': 'no luck'}", 1, 0, "done"),
    hangs: ("{'error': 'no answer within tool_timeout=0.3 s'}", 1, 1, "done"),
    hangs_later: ("{'error': 'no answer within tool_timeout=0.3 s'}", 1, 1, "done"),
    megabytes: (None, 0, 0, "overlong tool result"),
    number: ("42", 0, 0, "done"),
    unprintable: ("{'error': 'no text'}", 1, 0, "done"),
    surrogate: ("a?b", 0, 0, "done"),
    later: ("later", 0, 0, "done"),
}


@pytest.mark.parametrize("tool", OUTCOMES)
def test_what_a_tool_does_has_a_stated_outcome(running, tool):
    content, failures, timeouts, end = OUTCOMES[tool]
    runner, _, _ = running(one_call(tool.__name__), [tool], tool_timeout=0.3)
    (rollout,) = rollouts_of(runner, group(1))
    episode = rollout.episode
    results = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert results == ([] if content is None else [content])
    assert (episode.tool_calls, episode.tool_failures, episode.tool_timeouts) == (1, failures, timeouts)
    assert episode.end == end


@pytest.mark.parametrize("tool", [exits, exits_later])
def test_a_tool_that_exits_fails_the_attempt_and_not_the_process(running, tool):
    runner, _, _ = running(one_call(tool.__name__), [tool])
    (event,) = played(runner, group(1))
    assert isinstance(event, GroupFailed) and "SystemExit(1)" in event.reason


def test_a_call_that_is_nested_too_deep_stays_text(running):
    nested = f'<tool_call>\n{{"name": "number", "arguments": {"[" * 3000}'
    runner, _, _ = running(ScriptedEngine(lambda ids, number: said(nested)), [number], max_completion_length=4000)
    (rollout,) = rollouts_of(runner, group(1))
    assert rollout.episode.tool_calls == 0 and rollout.episode.messages[-1]["content"] == nested


def test_a_hanging_tool_delays_no_other_episode(running):
    engine = ScriptedEngine(
        lambda ids, number: said("end" if results_in(ids) else call("hangs" if number else "number"))
    )
    runner, _, _ = running(engine, [hangs, number])
    slow, quick = group(2), group(1)
    runner.submit([slow, quick])
    ended = []
    until(lambda: ended.extend(e for e in runner.wait(0.01) if isinstance(e, GroupFinished)) or ended)
    assert [event.request_id for event in ended] == [quick.request_id]


def test_many_slow_tools_wait_at_the_same_time(running):
    together, peak = threading.Barrier(24, timeout=60), []

    def slow():
        """Waits for the others."""
        peak.append(together.wait())
        return "x"

    runner, _, _ = running(one_call("slow"), [slow])
    assert len(rollouts_of(runner, group(24))) == 24 and len(peak) == 24


class Waiting(Plain):
    """Its tool waits until all episodes of the test wait in theirs."""

    async def tool(self):
        """Waits for the others."""
        self.calls += 1
        await self.together.wait()
        return self.calls


def test_256_episodes_with_slow_tools_wait_at_the_same_time_and_are_closed(running):
    """If any of them waited for another one to end, none would."""
    together, made, threads = asyncio.Barrier(256), Instances(Waiting), threading.active_count()
    Waiting.together = together
    runner, _, pool = running(one_call(), factories={None: made})
    events = played(runner, *(group(4, key=key) for key in range(64)))
    assert all(isinstance(event, GroupFinished) for event in events)
    most = threading.active_count() - threads
    assert len(made.made) == 256 and most <= 256 + 2  # one for each environment and the runner's own
    runner.close()
    assert made.closes == [1] * 256 and pool.open == 0
    until(lambda: threading.active_count() <= threads)


def test_synchronous_tools_of_256_episodes_have_at_most_tool_threads_threads(running):
    """The tools of as many episodes wait for one another, as often as it takes."""
    together, threads, most = threading.Barrier(64, timeout=60), threading.active_count(), []

    def slow():
        """Waits for the others."""
        together.wait()
        most.append(threading.active_count())
        return "x"

    runner, _, _ = running(one_call("slow"), [slow])  # tool_threads is 64
    events = played(runner, *(group(4, key=key) for key in range(64)))
    assert all(isinstance(event, GroupFinished) for event in events)
    assert len(most) == 256 and max(most) <= threads + 64 + 1  # and the runner's own


def test_an_environment_is_used_again_after_its_group_was_scored_and_closed_once(running):
    made = Instances(Plain)
    runner, play, pool = running(one_call(), factories={None: made})
    first = rollouts_of(runner, group(3))
    assert [r.episode.rewards for r in first] == [{"Plain": 1.0}] * 3
    keys = [r.episode.key for r in first]
    assert set(play.environments(keys)) == set(made.made) and len(made.made) == 3
    rollouts_of(runner, group(2))
    assert len(made.made) == 5  # those of the first group belong to it until it is scored
    runner.call(play.give_back, keys)
    rollouts_of(runner, group(3))
    assert len(made.made) == 5 and made.closes == [0] * 5
    runner.close()
    assert made.closes == [1] * 5 and pool.open == 0


class FailingReset(Plain):
    def reset(self, **row):
        raise ConnectionError("no container")


class NumberFromReset(Plain):
    def reset(self, **row):
        return 7


class FailingReward(Plain):
    def get_reward(self):
        raise ConnectionError("lost")


class NoNumber(Plain):
    def get_reward(self):
        return float("nan")


class HangingReset(Plain):
    def reset(self, **row):
        threading.Event().wait(600)


class DyingProcess(Plain):
    """An environment that is a process, which is killed under a call."""

    def reset(self, **row):
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tool(self):
        os.kill(self.process.pid, signal.SIGKILL)
        return self.process.communicate()[0].decode()

    def get_reward(self):
        if self.process.returncode:
            raise RuntimeError(f"the process ended with {self.process.returncode}")
        return 1.0


@pytest.mark.parametrize(
    "kind, reason",
    [
        (FailingReset, "ConnectionError('no container')"),
        (NumberFromReset, "reset() returned int: it must return a string"),
        (FailingReward, "ConnectionError('lost')"),
        (NoNumber, "the reward is nan: return a finite number"),
        (HangingReset, "no answer within tool_timeout=0.3 s"),
        (DyingProcess, "the process ended with -9"),
    ],
)
def test_an_environment_that_fails_fails_the_attempt_and_is_closed_once(running, kind, reason):
    made = Instances(kind)
    runner, _, pool = running(one_call(), factories={None: made}, tool_timeout=0.3)
    (event,) = played(runner, group(2))
    assert isinstance(event, GroupFailed) and reason in event.reason
    until(lambda: made.closes == [1] * len(made.made))
    runner.close()
    assert made.closes == [1] * len(made.made) and pool.open == 0


def test_a_factory_that_returns_one_instance_twice_fails_the_attempt(running):
    one = Plain()
    one.closes = 0
    runner, _, _ = running(one_call(), factories={None: lambda: one})
    (event,) = played(runner, group(2))
    assert isinstance(event, GroupFailed) and "the Plain that another episode uses" in event.reason
    until(lambda: one.closes == 1)


def test_a_factory_that_fails_fails_the_attempt(running):
    def factory():
        raise OSError("no licence")

    runner, _, _ = running(one_call(), factories={None: factory})
    (event,) = played(runner, group(1))
    assert isinstance(event, GroupFailed) and "no licence" in event.reason


class HangingTool(Plain):
    def tool(self):
        threading.Event().wait(600)


def test_an_environment_that_hangs_in_a_tool_goes_on_and_is_not_used_again(running):
    made = Instances(HangingTool)
    runner, play, _ = running(one_call(), factories={None: made}, tool_timeout=0.3)
    (rollout,) = rollouts_of(runner, group(1))
    assert rollout.episode.rewards == {"HangingTool": 0.0} and rollout.episode.tool_timeouts == 1
    runner.call(play.give_back, [rollout.episode.key])
    until(lambda: made.closes == [1])
    rollouts_of(runner, group(1))
    assert len(made.made) == 2


class HangingClose(Plain):
    def close(self):
        super().close()
        threading.Event().wait(600)


class FailingClose(Plain):
    def close(self):
        super().close()
        raise ValueError("no")


class LaterClose(Plain):
    async def close(self):
        super().close()


@pytest.mark.parametrize("kind, words", [(HangingClose, "did not return"), (FailingClose, "raised"), (LaterClose, "")])
def test_a_run_ends_whatever_close_does(running, caplog, monkeypatch, kind, words):
    monkeypatch.setattr("trl_a3po.episodes.environments.CLOSE_TIMEOUT", 0.2)
    made = Instances(kind)
    runner, _, _ = running(one_call(), factories={None: made})
    rollouts_of(runner, group(2))
    runner.close()
    assert made.closes == [1, 1] and words in caplog.text and bool(words) == bool(caplog.text)


@pytest.mark.parametrize("where", ["reset", "tool", "get_reward"])
def test_a_stop_in_the_middle_of_a_call_closes_every_instance_once(running, where):
    class Slow(Plain):
        pass

    inside, leave = threading.Event(), threading.Event()

    def slowly(self, **arguments):
        self.calls = 0
        inside.set()
        leave.wait(60)

    setattr(Slow, where, slowly)
    made = Instances(Slow)
    runner, _, _ = running(one_call(), factories={None: made})
    runner.submit([group(2), group(2)])
    until(lambda: (runner.wait(0.01) and False) or inside.is_set())
    began = time.monotonic()
    runner.close()
    leave.set()
    assert time.monotonic() - began < 30
    assert made.closes == [1] * len(made.made)


def test_an_instance_that_is_made_too_late_is_closed(running):
    entered, leave = threading.Event(), threading.Event()
    made = Instances(Plain)

    def factory():
        entered.set()
        leave.wait(60)
        return made()

    runner, _, _ = running(one_call(), factories={None: factory})
    request = group(1)
    runner.submit([request])
    until(entered.is_set)
    runner.cancel([request.request_id])
    leave.set()
    until(lambda: made.closes == [1])


def test_calls_of_an_environment_are_made_in_one_thread(running):
    class Affine(Plain):
        def __init__(self):
            self.threads = {threading.get_ident()}

        def reset(self, **row):
            self.threads.add(threading.get_ident())

        def tool(self):
            self.threads.add(threading.get_ident())

        def get_reward(self):
            self.threads.add(threading.get_ident())
            return 0.0

    made = Instances(Affine)
    runner, _, _ = running(one_call(), factories={None: made})
    rollouts_of(runner, group(3))
    runner.close()
    assert [len(environment.threads) for environment in made.made] == [1, 1, 1]
    assert len(set.union(*(environment.threads for environment in made.made))) == 3
