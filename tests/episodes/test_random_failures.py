"""Random episodes whose tools, environments and engine fail: every prompt is trained once or reported, every instance
is closed once, and no token is older than the bound."""

import os
import random
import threading
import time
from functools import partial

import cloudpickle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.episodes.chat import TOKENIZER, call, results_in, said
from tests.episodes.failing import Apart, World
from tests.episodes.playing import ScriptedEngine, tool_runner
from tests.rollout.queue_fakes import update
from tests.workers.processes import children, is_gone, until
from trl_a3po.errors import GenerationFailed
from trl_a3po.protocol.records import Score
from trl_a3po.rollout.prompt_stream import PromptStream, TokenizedPrompt
from trl_a3po.rollout.queue import EndOfData, GenerationQueue
from trl_a3po.workers.remote_object import RemoteObjects

BATCH, ROLLOUTS, BOUND, TAKES = 2, 2, 2, 4


def talk(prompt_ids, number):
    turns = (len(prompt_ids) + number) % 4
    return said("end" if results_in(prompt_ids) >= turns else call("tool"))


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.02, 0.1, 0.3]))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_prompt_is_trained_once_or_reported_and_every_instance_closed_once(seed, chance):
    train(seed, chance)


def train(seed: int, chance: float, *, hangs: bool = False, apart: bool = False) -> tuple[bool, World]:
    """A run in which `chance` of what can fail fails. Returns whether it ended with `GenerationFailed`, and what
    failed in this process.

    Args:
        hangs: what can fail may also hang, until long after the run.
        apart: environments have processes of their own, which may die.
    """
    world = World(seed, chance, hangs)
    noise = random.Random(seed + 1)
    engine = ScriptedEngine(talk, fails=lambda request: "died" if noise.random() < chance / 4 else None)
    remote = RemoteObjects() if apart else None
    environment = (
        partial(remote.make, cloudpickle.dumps(partial(Apart, seed, chance))) if remote else world.environment
    )
    runner, play, pool = tool_runner(
        engine, factories={None: environment}, tool_timeout=0.05 if hangs else None, processes=remote
    )
    messages = [[{"role": "user", "content": f"q{n}"}] for n in range(40)]
    prompts = PromptStream(
        ({"prompt": prompt} for prompt in messages),
        lambda row: TokenizedPrompt(
            TOKENIZER.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        ),
    )

    def score(group):
        keys = [rollout.episode.key for rollout in group.rollouts]
        environments = play.environments(keys)
        rewards = [list(rollout.episode.rewards.values()) for rollout in group.rollouts]
        if not hangs and not apart:
            assert [[float(environment.calls)] for environment in environments] == rewards
        runner.call(play.give_back, keys)
        return Score(rewards)

    queue = GenerationQueue(
        engine=runner, prompts=prompts, score=score, groups_per_batch=BATCH, num_rollouts=ROLLOUTS,
        max_staleness=BOUND, version_of_take=lambda take: take, total_takes=TAKES, stall_timeout=60.0,
        runs_episodes=True, describe_engine=runner.describe,
    )  # fmt: skip
    trained, reported = [], False
    try:
        queue.start(0)
        for version in range(TAKES):
            if version:
                queue.publish(update(version))
            for group in queue.take(version):
                trained.append(group.prompt.index)
                assert len(group.rollouts) == ROLLOUTS
                for rollout in group.rollouts:
                    assert version - BOUND <= min(rollout.sampled_versions)
                    assert max(rollout.sampled_versions) <= version
    except GenerationFailed as failure:
        reported = "failed 3 times" in str(failure)
        assert reported
    except EndOfData:
        raise AssertionError("there were prompts enough") from None
    finally:
        queue.close()
        runner.close()
        world.over.set()
    assert len(set(trained)) == len(trained) and (reported or len(trained) == BATCH * TAKES)
    assert [environment.closes for environment in world.made] == [1] * len(world.made)
    assert pool.open == 0 and not world.used_after_close
    outcomes = queue.outcomes()
    assert outcomes.open_prompts == outcomes.open_attempts == 0 and outcomes.count("trained") == len(trained)
    return reported, world


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_run_of_random_failures_leaves_no_thread_file_or_process():
    """As long as `TRL_A3PO_FAULT_MINUTES` says, or three minutes."""
    until_time = time.monotonic() + 60 * float(os.environ.get("TRL_A3PO_FAULT_MINUTES", "3"))
    train(0, 0.1)
    train(0, 0.1, apart=True)
    threads, files = threading.active_count(), open_files()
    runs = reported = faults = 0
    hung = 0.0
    try:
        while time.monotonic() < until_time:
            runs += 1
            chance = [0.02, 0.1, 0.3][runs % 3]
            ended_early, world = train(runs, chance, hangs=runs % 4 == 1, apart=runs % 8 == 2)
            reported += ended_early
            until(lambda: threading.active_count() <= threads)
            until(lambda: open_files() <= files)
            assert not [pid for pid in children() if not is_gone(pid)], "a process is left"
            faults, hung = faults + world.faults, hung + world.hung_seconds  # once nothing hangs any more
    finally:  # also for a run that is cut off
        print(
            f"{runs} runs with {faults} faults, which hung for {hung:.0f} s in all; {reported} runs ended with "
            "GenerationFailed, and none before the last left a thread, file or process."
        )
    assert runs > reported > 0


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
