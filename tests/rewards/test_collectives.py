"""Reward functions that wait for the other processes of a run, which do not call them: refused at the call."""

import asyncio
import contextlib

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, reduce
from torch.distributed import all_gather_object as imported_all_gather_object

from tests.rewards.test_scorer import group
from tests.rewards.test_worker_pool import state
from trl_a3po.errors import RewardError
from trl_a3po.rewards.scorer import RewardScorer
from trl_a3po.rewards.worker_pool import RewardWorkers


def completions(group):
    return ["c"] * len(group.rollouts)


def scorer(func, processes=2):
    return RewardScorer([func], ["centred"], completions, lambda group: None, processes=processes)


@pytest.mark.parametrize(
    ("collective", "named"),
    [
        (lambda: dist.all_reduce(torch.ones(1)), "torch.distributed.all_reduce"),
        (lambda: dist.barrier(), "torch.distributed.barrier"),
        (lambda: imported_all_gather_object([None], 1.0), "torch.distributed.all_gather_object"),
        (lambda: gather_object([1.0]), "an operation of accelerate"),
        (lambda: gather(torch.ones(1)), "an operation of accelerate"),
        (lambda: reduce(torch.ones(1)), "an operation of accelerate"),
        (lambda: broadcast_object_list([1.0]), "an operation of accelerate"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_operation_across_processes_is_refused_also_where_every_exception_is_swallowed(collective, named, is_async):
    def reward(completions, **kwargs):
        with contextlib.suppress(BaseException):
            collective()
        return [0.0] * len(completions)

    async def later(completions, **kwargs):
        await asyncio.sleep(0)
        return reward(completions)

    with pytest.raises(RewardError, match=rf"'centred' calls {named}.*waits for every process.*scale_rewards='batch'"):
        scorer(later if is_async else reward)(group())


def test_questions_about_the_run_are_answered():
    def reward(completions, **kwargs):
        assert not dist.is_initialized() and PartialState().num_processes == 1
        with pytest.raises(ValueError, match="not been initialized"):
            dist.get_rank()
        return [1.0] * len(completions)

    assert scorer(reward)(group()).rewards == [[1.0]] * 3


def test_a_run_of_one_process_gathers_from_itself():
    def reward(completions, **kwargs):
        return gather_object([1.0] * len(completions))

    assert scorer(reward, processes=1)(group()).rewards == [[1.0]] * 3


def test_a_reward_worker_refuses_it_too():
    def reward(completions, **kwargs):
        return gather_object([1.0] * len(completions))

    workers = RewardWorkers([reward], ["centred"], completions, state, workers=1, processes=2)
    workers.start()
    try:
        with pytest.raises(RewardError, match="'centred' calls an operation of accelerate"):
            workers(group())
    finally:
        workers.close()
