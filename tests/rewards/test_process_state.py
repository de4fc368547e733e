"""Reward functions that change what belongs to the whole process: they run in a process of their own, and training is
what it would be without them."""

import contextlib
import io
import multiprocessing
import os
import random
import signal
import sys
from random import seed as imported_seed

import numpy as np
import pytest
import torch
import transformers
from numpy.random import seed as imported_numpy_seed
from torch import manual_seed as imported_manual_seed
from transformers import AutoModelForCausalLM

from tests.rewards.test_main_thread import group
from tests.runs import build, reward
from tests.tiny import tiny_config, tiny_tokenizer
from trl_a3po.errors import RewardError
from trl_a3po.protocol.records import Score
from trl_a3po.rewards.scorer import RewardScorer
from trl_a3po.rewards.stand_ins import replacements

IN_PROCESS = -1.0


class Process:
    """Stands for a process of a function's own."""

    def __init__(self, column):
        pass

    def start(self):
        pass

    def wait_until_ready(self):
        pass

    def __call__(self, group):
        return Score([[IN_PROCESS]] * len(group.rollouts))


def scored(func, own_process=Process):
    """The rewards of a group, of which the first is `IN_PROCESS` if the function was sent to a process."""
    names, completions = ["reward0"], ["c"] * 2
    return RewardScorer([func], names, lambda group: completions, lambda group: None, own_process=own_process)(
        group()
    ).rewards


def seeds_torch():
    torch.manual_seed(0)


def seeds_torch_by_an_imported_name():
    imported_manual_seed(0)


def restores_torch():
    torch.random.set_rng_state(torch.random.get_rng_state())


def seeds_python():
    random.seed(0)


def seeds_numpy():
    np.random.seed(0)


def seeds_python_by_an_imported_name():
    imported_seed("a seed")


def seeds_numpy_by_an_imported_name():
    imported_numpy_seed(0)


def seeds_all():
    transformers.set_seed(0)


def goes_elsewhere():
    with contextlib.chdir("/"):
        pass


def captures():
    with contextlib.redirect_stdout(io.StringIO()):
        print("x")


def captures_by_hand():
    before, sys.stdout = sys.stdout, io.StringIO()
    sys.stdout = before


def changes_dtype():
    torch.set_default_dtype(torch.float64)


def limits_memory():
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def masks():
    os.umask(os.umask(0o077))


def state():
    """Everything of the process that the functions of this file change."""
    os.umask(umask := os.umask(0))
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return drawn, os.getcwd(), sys.stdout, type(sys), torch.get_default_dtype(), umask


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (seeds_torch, "torch.manual_seed"),
        (seeds_torch_by_an_imported_name, "torch."),
        (restores_torch, "torch.default_generator.set_state"),
        (seeds_python, "random.seed"),
        (seeds_numpy, "numpy.random.seed"),
        (seeds_python_by_an_imported_name, "random.seed"),
        (seeds_numpy_by_an_imported_name, "numpy.random.seed"),
        (seeds_all, "random.seed"),
        (goes_elsewhere, "os.chdir"),
        (captures, "another sys.stdout"),
        (captures_by_hand, "another sys.stdout"),
        (changes_dtype, "torch.set_default_dtype"),
        (limits_memory, "resource.setrlimit"),
        (masks, "os.umask"),
    ],
)
def test_a_change_of_the_process_is_noticed_before_it_has_an_effect(caplog, change, named):
    def changes(completions, **kwargs):
        try:
            change()
        except:  # noqa: E722
            return [0.0] * len(completions)
        return [1.0] * len(completions)

    before = state()
    assert scored(changes) == [[IN_PROCESS]] * 2 and state() == before
    assert [text for text in caplog.messages if f"'reward0' uses {named}" in text]


def test_generators_and_folders_of_its_own_leave_a_function_in_the_thread():
    def draws(completions, **kwargs):
        imported = random.Random()
        imported.seed(0)
        random.Random(0).random(), np.random.default_rng(0).random(), np.random.RandomState(0).random()
        torch.rand(1, generator=torch.Generator().manual_seed(0))
        torch.random.get_rng_state(), random.getstate(), os.getcwd(), print("printed")
        return [1.0] * len(completions)

    assert scored(draws) == [[1.0]] * 2


def test_a_function_that_draws_from_the_global_generators_stays_in_the_thread_and_draws_what_they_have():
    def draws(completions, **kwargs):
        return [random.random() + np.random.rand() + np.random.mtrand._rand.rand() + torch.rand(1).item()] * 2

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = draws([])[0]
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    assert scored(draws) == [[expected]] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_cannot_be_sent_to_a_process_is_called_again_in_the_thread(caplog, is_async):
    def own_process(column):
        raise RewardError("It cannot be sent.")

    def seeds(completions, log_metric, **kwargs):
        log_metric("called", 1)
        before = random.getstate()
        random.seed(0)
        drawn = random.random()
        random.setstate(before)
        return [drawn] * len(completions)

    async def seeds_later(**kwargs):
        return seeds(**kwargs)

    assert scored(seeds_later if is_async else seeds, own_process) == [[random.Random(0).random()]] * 2
    (told,) = [text for text in caplog.messages if "reward0" in text]
    assert "'reward0' uses random.seed, which" in told and "It cannot be sent. It stays in the thread" in told


def limited(results):
    signal.alarm(20)
    with contextlib.redirect_stdout(io.StringIO()):
        print("x")
    results.put(1.0)
    signal.alarm(0)


def test_a_forked_child_has_the_real_functions():
    def runs_code(completions, **kwargs):
        fork = multiprocessing.get_context("fork")
        results = fork.SimpleQueue()
        child = fork.Process(target=limited, args=(results,))
        child.start()
        child.join(60)
        ended = child.exitcode  # None: not after a minute
        return [results.get() if ended == 0 else float(ended or -1000)] * len(completions)

    assert scored(runs_code) == [[1.0]] * 2


def test_what_is_replaced_exists_and_is_put_back():
    def real():
        return [(owner, name, getattr(owner, name)) for owner, name, _ in replacements(lambda *_: None)]

    before = real()
    inside = []

    def looks(completions, **kwargs):
        inside.extend(real())
        return [0.0] * len(completions)

    scored(looks)
    assert real() == before and len(inside) == len(before) > 20
    assert all(found[2] is not now[2] for found, now in zip(before, inside, strict=True))


def test_training_is_what_it_is_without_the_reseeding(tmp_path):
    def reseeding(completion_ids, target, **kwargs):
        import torch

        torch.manual_seed(0)
        return [(sum(ids) + t) % 11 / 10 for ids, t in zip(completion_ids, target, strict=True)]

    def trained(reward_funcs):
        transformers.set_seed(5)
        model = AutoModelForCausalLM.from_config(tiny_config(attention_dropout=0.1))
        trainer = build(
            model, tmp_path, reward_funcs=reward_funcs, processing_class=tiny_tokenizer(), max_steps=3,
            max_staleness=1, schedule="fixed_lag",
        )  # fmt: skip
        trainer.train()
        return dict(model.named_parameters()), [entry.get("loss") for entry in trainer.state.log_history]

    expected, losses = trained(reward)
    parameters, same_losses = trained(reseeding)
    assert same_losses == losses
    for name, parameter in expected.items():
        assert torch.equal(parameters[name], parameter), name
