"""The thread and the event loop that all reward functions of a trainer share, and the copies that they receive."""

import asyncio
import os
import signal
import sqlite3
import sys
import threading

import pytest

from tests.rewards.test_scorer import group
from tests.rewards.test_worker_pool import state
from tests.runs import build
from tests.tiny import tiny_prompts
from trl_a3po.errors import RewardError
from trl_a3po.rewards.outside_training import called_in_thread
from trl_a3po.rewards.scorer import RewardScorer
from trl_a3po.rewards.thread import RewardThread
from trl_a3po.rewards.worker_pool import RewardWorkers


@pytest.fixture(scope="module")
def thread():
    return RewardThread()


def scorer(thread, *funcs):
    names = [f"reward{i}" for i in range(len(funcs))]
    return RewardScorer(funcs, names, lambda group: ["c"] * len(group.rollouts), lambda group: None, thread=thread)


def test_all_calls_share_one_thread_and_one_current_loop(thread):
    places = []

    def synchronous(completions, **kwargs):
        loop = asyncio.get_event_loop()
        loop.run_until_complete(asyncio.sleep(0))
        places.append((threading.get_ident(), loop))
        return [0.0] * len(completions)

    async def awaited(completions, **kwargs):
        places.append((threading.get_ident(), asyncio.get_running_loop()))
        return [0.0] * len(completions)

    score = scorer(thread, synchronous, awaited)
    score(group())
    score.score_all([group()])
    score.close()
    scorer(thread, synchronous, awaited)(group())
    assert len(places) == 6 and len(set(places)) == 1


def test_a_function_may_close_the_loop_or_run_its_own(thread):
    def closes(completions, **kwargs):
        asyncio.get_event_loop().close()
        asyncio.run(asyncio.sleep(0))
        return [0.0] * len(completions)

    async def awaited(completions, **kwargs):
        return [1.0] * len(completions)

    score = scorer(thread, closes, awaited)
    assert [score(group()).rewards for _ in range(2)] == [[[0.0, 1.0]] * 3] * 2


def test_a_connection_made_by_the_script_gets_a_sentence_that_names_the_thread(thread):
    connection = sqlite3.connect(":memory:")

    def reward(completions, **kwargs):
        connection.execute("select 1")

    with pytest.raises(RewardError, match=r"in the thread 'a3po rewards'.*check_same_thread=False"):
        scorer(thread, reward)(group())


def test_a_function_may_change_what_it_receives(thread):
    def extends(prompts, completions, tests, **kwargs):
        for prompt, test in zip(prompts, tests, strict=True):
            prompt.append({"role": "assistant", "content": "b"})
            prompt[0]["content"] = "changed"
            test.clear()
        completions.clear()
        return [float(len(prompt)) for prompt in prompts]

    given = group(tests=[1, 2])
    given.prompt.example["prompt"] = [{"role": "user", "content": "a"}]
    assert scorer(thread, extends, extends)(given).rewards == [[2.0, 2.0]] * 3
    assert given.prompt.example == {"prompt": [{"role": "user", "content": "a"}], "tests": [1, 2]}


def exits_in_a_child(completions, **kwargs):
    if (child := os.fork()) == 0:
        sys.exit(3)
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(completions)


def returns_in_a_child(completions, **kwargs):
    if (child := os.fork()) == 0:
        return [7.0] * len(completions)
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(completions)


def test_a_forked_child_ends_where_it_leaves_the_function(thread):
    score = scorer(thread, exits_in_a_child, returns_in_a_child)
    assert score(group()).rewards == [[3.0, 0.0]] * 3


def test_a_forked_child_does_not_answer_for_its_reward_worker():
    def decode(group):
        return ["c"] * len(group.rollouts)

    names = ["exits", "returns"]
    workers = RewardWorkers([exits_in_a_child, returns_in_a_child], names, decode, state, workers=1)
    workers.start()
    try:
        assert [workers(group()).rewards for _ in range(2)] == [[[3.0, 0.0]] * 3] * 2
    finally:
        workers.close()


def test_training_and_evaluations_inside_and_outside_of_it_share_them(model_path, tmp_path):
    places = set()

    def synchronous(completion_ids, **kwargs):
        assert "a3po watchdog" in [thread.name for thread in threading.enumerate()]
        places.add((threading.get_ident(), asyncio.get_event_loop()))
        return [float(len(ids) % 3) for ids in completion_ids]

    async def awaited(completion_ids, **kwargs):
        places.add((threading.get_ident(), asyncio.get_running_loop()))
        return [float(len(ids) % 2) for ids in completion_ids]

    trainer = build(
        model_path, tmp_path, reward_funcs=[synchronous, awaited], max_steps=1, eval_dataset=tiny_prompts(2),
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.evaluate()
    trainer.train()
    trainer.train()
    trainer.evaluate()
    assert len(places) == 1
    assert "a3po watchdog" not in [thread.name for thread in threading.enumerate()]


def test_an_async_function_that_asks_for_a_signal_outside_of_training_is_awaited_in_the_main_thread():
    async def limits_its_time(completions, log_metric, **kwargs):
        log_metric("called", 1)
        try:
            before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            signal.signal(signal.SIGUSR2, before)
        except Exception:
            return [0.0] * len(completions)
        return [1.0] * len(completions)

    logged = []
    call = called_in_thread(limits_its_time, RewardThread())
    returned = call(completions=[0, 0], log_extra=None, log_metric=lambda *metric: logged.append(metric))
    assert returned == [1.0, 1.0] and logged == [("called", 1)]
