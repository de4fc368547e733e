"""What a reward function receives, and what becomes of what it returns."""

import asyncio
import gc
import math
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from tests.workers.processes import until
from trl_a3po.errors import RewardError
from trl_a3po.protocol.records import Group, Prompt, Rollout
from trl_a3po.rewards.scorer import RewardScorer


def group(size=3, **columns):
    rollouts = [Rollout([5, 6 + i], [-1.0, -2.0], [0, 0]) for i in range(size)]
    return Group(Prompt(7, {"prompt": "p", **columns}, [1, 2]), rollouts)


def scorer(*funcs):
    names = [f"reward{i}" for i in range(len(funcs))]
    return RewardScorer(
        funcs, names, lambda group: [f"c{r.token_ids}" for r in group.rollouts], lambda group: "the state"
    )


def test_a_reward_function_receives_what_grpo_trainer_passes():
    seen = {}

    def reward(**kwargs):
        seen.update(kwargs)
        return [0.0, 1.0, 2.0]

    score = scorer(reward)(group(target=4, completion="hidden"))
    assert score.rewards == [[0.0], [1.0], [2.0]]
    assert seen["prompts"] == ["p"] * 3
    assert seen["completions"] == ["c[5, 6]", "c[5, 7]", "c[5, 8]"]
    assert seen["completion_ids"] == [[5, 6], [5, 7], [5, 8]]
    assert seen["target"] == [4] * 3
    assert seen["trainer_state"] == "the state"
    assert "completion" not in seen and "prompt" not in seen


def test_several_functions_fill_their_columns_and_async_ones_run_together():
    started = []

    def make(value):
        async def reward(completions, **kwargs):
            started.append(value)
            while len(started) < 2:  # ends only if the other one runs at the same time
                await asyncio.sleep(0)
            return [value] * len(completions)

        return reward

    score = scorer(make(1), lambda completions, **kwargs: [2] * len(completions), make(3))(group())
    assert score.rewards == [[1.0, 2.0, 3.0]] * 3


FREEZES = """
import itertools
from tests.rewards.test_scorer import group
from trl_a3po.rewards.scorer import RewardScorer

def fine(completions, **kwargs):
    return [0.0] * len(completions)

def freezes(completions, **kwargs):
    return max(itertools.repeat(1))

score = RewardScorer([fine, freezes], ["fine", "freezes"], lambda group: ["c"] * 3, lambda group: None,
                     timeout=0.5, watchdog=True)
score.start()
score(group())
"""


def test_a_function_that_holds_the_interpreter_lock_is_named_where_the_process_ends():
    ended = subprocess.run([sys.executable, "-c", FREEZES], capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert "while the reward function 'freezes' was running" in ended.stderr
    assert "Set reward_workers=1 and a reward_timeout" in ended.stderr


def test_an_async_function_keeps_its_event_loop():
    loops = []

    async def reward(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    score = scorer(reward)
    score(group())
    score(group())
    score.close()
    score.close()
    assert loops[0] is loops[1]


def test_it_closes_where_another_event_loop_runs_as_in_a_notebook():
    loops = []

    async def reward(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    score = scorer(reward)

    async def cell(score):
        await asyncio.to_thread(score, group())
        score.close()

    asyncio.run(cell(score))
    assert not loops[0].is_closed()  # the next `train` of the trainer uses it again
    del score
    gc.collect()
    until(loops[0].is_closed)


def test_an_object_with_an_async_call_is_awaited():
    class Judge:
        async def __call__(self, completions, **kwargs):
            return [0.5] * len(completions)

    assert scorer(Judge())(group()).rewards == [[0.5]] * 3


def test_closures_keep_their_state():
    calls = []

    def reward(completions, **kwargs):
        calls.append(1)
        return [len(calls)] * len(completions)

    score = scorer(reward)
    assert [score(group(1)).rewards[0][0] for _ in range(3)] == [1, 2, 3]


def test_none_becomes_nan_and_numbers_of_any_kind_become_floats():
    values = [None, True, np.float32(0.5), torch.tensor(2), 3]
    rewards = [row[0] for row in scorer(lambda **kwargs: values)(group(5)).rewards]
    assert math.isnan(rewards[0]) and rewards[1:] == [1.0, 0.5, 2.0, 3.0]


def test_a_column_computed_elsewhere_stays_nan():
    rewards = scorer(None, lambda **kwargs: [1, 2, 3])(group()).rewards
    assert all(math.isnan(row[0]) for row in rewards) and [row[1] for row in rewards] == [1, 2, 3]


def test_extra_columns_and_metrics_are_recorded():
    def reward(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(c) for c in completions])
        log_metric("seen", 1)
        log_metric("seen", 2)
        return [0.0] * len(completions)

    score = scorer(reward)(group())
    assert score.extra_columns == {"length": [7, 7, 7]}
    assert score.metrics == [("seen", 1.0), ("seen", 2.0)]


@pytest.mark.parametrize(
    "returned, message",
    [
        ([1.0, 2.0], "returned 2 rewards for a group of 3"),
        (None, "returned None instead of a list"),
        (1.0, "returned a float: return a list"),
        (asyncio.sleep(0), "returned a coroutine: define the function itself with async def"),
        ([1.0, "good", 2.0], "returned the string 'good' for completion 1"),
        ([1.0, 2.0, [3.0]], "returned a list for completion 2"),
        ([1.0, math.nan, 2.0], "returned nan for completion 1"),
        ([math.inf, 1.0, 2.0], "returned inf for completion 0"),
        ([10**400, 1.0, 2.0], "returned inf for completion 0"),
        ([1.0, torch.zeros(2), 2.0], "returned a Tensor for completion 1"),
        ((1 / n for n in (1, 0, 1)), "returned a generator that raised ZeroDivisionError"),
    ],
)
def test_anything_but_one_number_per_completion_is_an_error_that_names_the_function(returned, message):
    with pytest.raises(RewardError, match="'reward0' ") as error:
        scorer(lambda **kwargs: returned)(group())
    assert message in str(error.value)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_function_raises_is_the_cause(is_async):
    async def later(**kwargs):
        raise KeyError("target")

    def now(**kwargs):
        raise KeyError("target")

    with pytest.raises(RewardError, match="'reward0' raised KeyError") as error:
        scorer(later if is_async else now)(group())
    assert isinstance(error.value.__cause__, KeyError)


async def exits(**kwargs):
    raise SystemExit("enough")


async def is_interrupted(**kwargs):
    raise KeyboardInterrupt


async def has_a_cancelled_task(**kwargs):
    task = asyncio.create_task(asyncio.sleep(30))
    task.cancel()
    await task


async def has_a_task_that_exits(**kwargs):
    task = asyncio.create_task(exits())
    await asyncio.sleep(30)
    await task


async def lacks_an_argument(gold, **kwargs):
    return [0.0] * len(gold)


async def cancels_whatever_there_is(**kwargs):
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    "func, raised",
    [
        (exits, SystemExit),
        (is_interrupted, KeyboardInterrupt),
        (has_a_cancelled_task, asyncio.CancelledError),
        (has_a_task_that_exits, SystemExit),
        (lacks_an_argument, TypeError),
        (cancels_whatever_there_is, asyncio.CancelledError),
    ],
)
def test_whatever_ends_an_async_function_is_the_cause_of_an_error_that_names_it(func, raised):
    score = scorer(lambda completions, **kwargs: [0.0] * len(completions), func)
    with pytest.raises(RewardError, match=f"'reward1' raised {raised.__name__}") as error:
        score(group())
    assert isinstance(error.value.__cause__, raised)
    score.close()


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_whatever_ends_a_function_is_the_cause_of_an_error_that_names_it(raised):
    def ends(**kwargs):
        raise raised("enough")

    with pytest.raises(RewardError, match=f"'reward0' raised {raised.__name__}") as error:
        scorer(ends)(group())
    assert isinstance(error.value.__cause__, raised)


def test_async_functions_beside_one_that_fails_run_to_their_end():
    ended = []

    async def slower(completions, **kwargs):
        await asyncio.sleep(0.05)
        ended.append(1)
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="'reward0' raised CancelledError"):
        scorer(has_a_cancelled_task, slower)(group())
    assert ended == [1]


def test_an_exception_may_be_returned_and_is_no_list():
    async def gives(**kwargs):
        return ValueError("odd")

    with pytest.raises(RewardError, match="'reward0' returned a ValueError: return a list"):
        scorer(gives)(group())


def test_it_tells_a_function_that_is_awaited_from_one_that_cannot_be_interrupted():
    told = []

    def now(completions, **kwargs):
        told.append(score.describe())
        return [0.0] * len(completions)

    async def later(completions, **kwargs):
        return now(completions)

    score = scorer(now, later)
    score(group())
    assert "'reward0' has been running for" in told[0] and "which cannot be interrupted" in told[0]
    assert "'reward1' has been awaited for" in told[1] and "interrupted" not in told[1]
    assert score.describe() == ""


def test_an_extra_column_of_the_wrong_length_is_refused():
    def reward(completions, log_extra, **kwargs):
        log_extra("length", [1])
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="log_extra\\('length'"):
        scorer(reward)(group())


# --- the end of the run -------------------------------------------------------------------------------------------


def test_no_function_is_called_after_an_interrupt():
    called = []

    def ends_the_run(completions, **kwargs):
        called.append("ends the run")
        score.interrupt()
        return [0.0] * len(completions)

    def another(completions, **kwargs):
        called.append("another")
        return [0.0] * len(completions)

    async def judge(**kwargs):
        called.append("judge")
        await asyncio.sleep(30)

    for after in (another, judge):
        score = scorer(ends_the_run, after)
        with pytest.raises(RewardError, match="The run has ended"):
            score(group())
        with pytest.raises(RewardError, match="The run has ended"):
            score(group())
        score.close()
    assert called == ["ends the run"] * 2


def test_an_interrupt_just_before_the_functions_are_awaited_is_not_missed():
    async def judge(**kwargs):
        await asyncio.sleep(30)

    class InterruptedLate(RewardScorer):
        async def _gather(self, *args):
            self.interrupt()  # no check is left but the one after `_awaited` is set
            return await super()._gather(*args)

    score = InterruptedLate([judge], ["judge"], lambda group: [], lambda group: None)
    with pytest.raises(RewardError, match="The run has ended"):
        score(group())
    score.close()


def test_an_interrupt_ends_what_is_awaited():
    begun = threading.Event()

    async def judge(**kwargs):
        begun.set()
        await asyncio.sleep(30)

    score = scorer(judge)
    interrupter = threading.Thread(target=lambda: begun.wait(20) and score.interrupt())
    interrupter.start()
    with pytest.raises(RewardError, match="'reward0' was being awaited when the run ended"):
        score(group())
    interrupter.join()
    score.close()


def test_an_evaluations_next_group_is_not_begun_after_an_interrupt():
    groups = []

    def reward(completions, **kwargs):
        groups.append(1)
        score.interrupt()
        return [0.0] * len(completions)

    score = scorer(reward)
    with pytest.raises(RewardError, match="The run has ended"):
        score.score_all([group(), group()])
    assert groups == [1]
