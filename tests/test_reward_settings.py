"""Runs with reward workers, with limits, and with groups dropped, rejected or changed: what is trained and counted."""

import asyncio
import os
import threading
import time

import pytest
import torch

from tests.runs import COMPLETE, TakeRecorder, assert_same_gradients, build, logged, reward, train_recorded
from tests.tiny import tiny_prompts
from trl_a3po import A3POConfig, Rejection
from trl_a3po.errors import RewardError, StallError
from trl_a3po.testing import StubEngine

pytestmark = pytest.mark.long

GROUPS = 8  # of the four steps that `build` trains


class Recorder(TakeRecorder):
    @property
    def targets(self) -> list[int]:
        """The `target` of every group that was trained on."""
        return [group.prompt.example["target"] for _, groups in self.takes for group in groups]


def without_thirds(completion_ids, target, **kwargs):
    """Rewards without variance wherever the target divides by three."""
    return [0.3 if t % 3 == 0 else i / 2 for i, t in enumerate(target)]


def targets_in_order(trainer, kept):
    """The first targets that a run would train on if those that are not `kept` were not in the data."""
    order = [trainer.train_dataset[i]["target"] for i in dict.fromkeys(trainer._get_train_sampler())]
    return [target for target in order if kept(target)][:GROUPS]


# --- which groups are trained -------------------------------------------------------------------------------------


def test_groups_without_variance_are_replaced_and_counted(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, Recorder, reward_funcs=without_thirds, drop_zero_variance_groups=True, max_staleness=2
    )
    trainer.train()
    assert trainer.state.global_step == 4
    assert sorted(trainer.targets) == sorted(targets_in_order(trainer, lambda target: target % 3))
    assert logged(trainer, "frac_reward_zero_std") == [0.0] * 4
    dropped = trainer.outcomes.prompt_outcomes["rejected: no variance in its rewards"]
    assert dropped > 0 and logged(trainer, "a3po/outcomes/rejected")[-1] <= dropped
    assert logged(trainer, "a3po/outcomes/rejected") == sorted(logged(trainer, "a3po/outcomes/rejected"))
    assert trainer.outcomes.prompts == GROUPS + dropped + trainer.outcomes.count("unused")


def test_groups_without_variance_are_kept_by_default(model_path, tmp_path):
    trainer = build(model_path, tmp_path, Recorder, reward_funcs=without_thirds)
    trainer.train()
    assert trainer.targets == targets_in_order(trainer, lambda target: True)
    assert any(logged(trainer, "frac_reward_zero_std"))


def test_data_of_which_nothing_is_left_ends_the_run(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, reward_funcs=lambda completion_ids, **kwargs: [1.0] * len(completion_ids),
        drop_zero_variance_groups=True, max_rejected_groups_in_a_row=12,
    )  # fmt: skip
    with pytest.raises(
        StallError, match=r"13 groups in a row were rejected.*no variance.*max_rejected_groups_in_a_row=12"
    ):
        trainer.train()


def test_on_group_rejects_and_its_reason_is_an_outcome(model_path, tmp_path):
    def on_group(group):
        return Rejection("odd") if group.prompt.example["target"] % 2 else None

    trainer = build(model_path, tmp_path, Recorder, on_group=on_group)
    trainer.train()
    assert sorted(trainer.targets) == sorted(targets_in_order(trainer, lambda target: target % 2 == 0))
    assert trainer.outcomes.prompt_outcomes["rejected: odd"] > 0


def test_on_group_changes_what_is_trained(model_path, tmp_path):
    def negated(**kwargs):
        return [-value for value in reward(**kwargs)]

    def on_group(group):
        assert "a3po reward thread" in threading.current_thread().name
        group.score.rewards = [[-value for value in row] for row in group.score.rewards]
        return group

    expected = train_recorded(build(model_path, tmp_path, reward_funcs=negated))
    assert_same_gradients(train_recorded(build(model_path, tmp_path, on_group=on_group)), expected, rtol=0, atol=1e-6)


def test_what_on_group_raises_ends_the_run_with_its_cause(model_path, tmp_path):
    engine = StubEngine(COMPLETE)
    trainer = build(model_path, tmp_path, on_group=lambda group: {}["gold"], engine=engine)
    with pytest.raises(RewardError, match="on_group raised KeyError") as error:
        trainer.train()
    assert isinstance(error.value.__cause__, KeyError) and engine.closed


def test_the_filter_refuses_reward_models_and_the_hook_what_cannot_be_called(model_path, tmp_path):
    class RewardModel(torch.nn.Linear):
        config = type("Config", (), {"_name_or_path": "a/reward-model"})()

    with pytest.raises(
        ValueError, match="drop_zero_variance_groups=True, but the reward model 'reward-model' runs after"
    ):
        build(
            model_path, tmp_path, reward_funcs=[reward, RewardModel(1, 1)], drop_zero_variance_groups=True,
            reward_processing_classes=[None, object.__new__(_AnyTokenizer)],
        )  # fmt: skip
    with pytest.raises(TypeError, match="on_group='keep' is not a function"):
        build(model_path, tmp_path, on_group="keep")


class _AnyTokenizer:
    pad_token_id, pad_token = 0, "<pad>"


# --- reward workers -----------------------------------------------------------------------------------------------


def test_a_run_with_workers_is_the_run_without(model_path, tmp_path):
    def logging_reward(completion_ids, target, trainer_state, log_extra, log_metric, **kwargs):
        log_extra("target", target)
        log_metric("elsewhere", os.getpid() != here)
        log_metric("version", trainer_state.global_step)
        return [len(ids) for ids in completion_ids]

    here = os.getpid()
    expected = train_recorded(build(model_path, tmp_path, reward_funcs=logging_reward))
    trainer = build(model_path, tmp_path, Recorder, reward_funcs=logging_reward, reward_workers=2)
    assert_same_gradients(train_recorded(trainer), expected, rtol=0, atol=1e-6)
    assert logged(trainer, "elsewhere") == [1.0] * 4
    assert logged(trainer, "version") == [0.0, 1.0, 2.0, 3.0]
    assert list(trainer._logs["extra"]["target"])[::4] == trainer.targets[-2:]


def hanging_at_some():
    """A closure, which travels by value: a function of this file would have each worker import the file."""

    def hangs_at_some(completion_ids, target, **kwargs):
        if target[0] % 16 == 0:
            time.sleep(3600)
        return [len(ids) for ids in completion_ids]

    return hangs_at_some


def test_a_hanging_reward_costs_its_group_and_not_the_run(model_path, tmp_path):
    trainer = build(
        model_path,
        tmp_path,
        Recorder,
        reward_funcs=hanging_at_some(),
        reward_workers=2,
        reward_timeout=2.0,
        max_steps=8,
    )
    trainer.train()
    kept = [target for target in trainer.targets if target % 16]
    assert trainer.state.global_step == 8 and trainer.targets == kept
    lost = trainer.outcomes.prompt_outcomes["rejected: reward timeout in 'hangs_at_some'"]
    assert 1 <= lost <= 2 and logged(trainer, "a3po/reward/timeouts")[-1] == lost


def test_a_hanging_reward_may_be_worth_a_value(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, Recorder, reward_funcs=hanging_at_some(), reward_workers=2, reward_timeout=2.0,
        reward_on_timeout=-100.0, train_dataset=tiny_prompts(8), max_steps=4,
    )  # fmt: skip
    trainer.train()
    assert sorted(trainer.targets) == list(range(8)) and trainer.outcomes.count("rejected") == 0
    assert logged(trainer, "a3po/reward/timeouts")[-1] == 1
    assert min(logged(trainer, "rewards/hangs_at_some/mean")) < -40.0


def test_a_hanging_reward_in_the_thread_ends_the_run_and_names_the_setting(model_path, tmp_path):
    release = threading.Event()

    def hangs(completion_ids, **kwargs):
        release.wait(60)
        return [0.0] * len(completion_ids)

    try:
        with pytest.raises(
            StallError, match=r"longer than reward_timeout=0.5 s.*'hangs'.*set reward_workers=1 or more"
        ):
            build(model_path, tmp_path, reward_funcs=hangs, reward_timeout=0.5).train()
    finally:
        release.set()


def test_a_hanging_async_reward_ends_in_the_report_too(model_path, tmp_path):
    async def hangs(**kwargs):
        await asyncio.sleep(3600)

    with pytest.raises(StallError, match=r"stall_timeout.*'hangs'.*set reward_workers=1 or more and a reward_timeout"):
        build(model_path, tmp_path, reward_funcs=hangs, stall_timeout=1.0).train()
    assert "a3po reward thread" not in [thread.name for thread in threading.enumerate()]  # the wait is cancelled


@pytest.mark.parametrize("limit", ["reward_timeout", "stall_timeout"])
def test_a_reward_that_hangs_in_an_evaluation_ends_the_run_and_names_the_settings(model_path, tmp_path, limit):
    release = threading.Event()

    def hangs_later(completion_ids, target, **kwargs):
        if target[0] == -1:
            release.wait(60)
        return [len(ids) for ids in completion_ids]

    trainer = build(
        model_path, tmp_path, reward_funcs=hangs_later, max_steps=2,
        eval_dataset=tiny_prompts(4).map(lambda row: {"target": -1}),
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, **{limit: 1.0},
    )  # fmt: skip
    try:
        with pytest.raises(
            StallError, match=rf"{limit}=1 s.*'hangs_later'.*reward_workers=1 or more and a reward_timeout"
        ):
            trainer.train()
    finally:
        release.set()


def test_a_function_that_always_hangs_is_told_of_reward_timeout(model_path, tmp_path):
    def always():
        def hangs(**kwargs):
            time.sleep(3600)

        return hangs

    trainer = build(
        model_path, tmp_path, reward_funcs=always(), reward_workers=1, reward_timeout=0.5,
        max_rejected_groups_in_a_row=1,
    )  # fmt: skip
    with pytest.raises(StallError, match=r"reward timeout in 'hangs'.*within reward_timeout=0.5 s, or raise"):
        trainer.train()


def test_an_error_in_a_worker_ends_the_run_and_the_workers(model_path, tmp_path):
    def broken(trainer_state, **kwargs):
        if trainer_state.global_step == 2:
            raise KeyError(os.getpid())
        return [0.0, 1.0, 2.0, 3.0]

    with pytest.raises(RewardError, match="'broken' raised KeyError") as error:
        build(model_path, tmp_path, reward_funcs=broken, reward_workers=1).train()
    assert " in broken" in str(error.value.__cause__)
    assert not os.path.exists(f"/proc/{str(error.value).split('(')[1].split(')')[0]}")


def test_evaluation_is_scored_by_the_workers(model_path, tmp_path):
    here = os.getpid()

    def elsewhere(completion_ids, **kwargs):
        return [float(os.getpid() != here)] * len(completion_ids)

    trainer = build(
        model_path, tmp_path, reward_funcs=elsewhere, reward_workers=2, eval_dataset=tiny_prompts(4), max_steps=2,
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8,
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "eval_reward") == [1.0, 1.0]


@pytest.mark.parametrize("rows", [3, 1])
def test_evaluation_groups_that_lost_their_reward_are_told_of_and_at_least_one_is_left(
    model_path, tmp_path, caplog, rows
):
    def hanging():
        def hangs_at_zero(completion_ids, target, **kwargs):
            if target[0] == 0:
                time.sleep(3600)
            return [1.0, 2.0, 3.0, 4.0]

        return hangs_at_zero

    trainer = build(
        model_path, tmp_path, reward_funcs=hanging(), reward_workers=2, reward_timeout=0.5, max_steps=2,
        train_dataset=tiny_prompts(9).select(range(1, 9)), eval_dataset=tiny_prompts(rows), eval_strategy="steps",
        eval_steps=1, per_device_eval_batch_size=4,
    )  # fmt: skip
    if rows == 1:
        with pytest.raises(RewardError, match=r"1 of 1 groups of the evaluation.*reward_timeout=0.5 s"):
            trainer.train()
    else:
        trainer.train()
        assert logged(trainer, "eval_reward") == [2.5, 2.5]
        told = [r for r in caplog.messages if "1 of 3 groups of the evaluation have no reward" in r]
        assert len(told) == 1 and "'hangs_at_zero'" in told[0]
        assert logged(trainer, "a3po/reward/timeouts")[-1] == 1


def test_a_function_that_no_worker_can_get_is_refused_before_training(model_path, tmp_path):
    lock = threading.Lock()

    def locked(completion_ids, **kwargs):
        with lock:
            return [0.0] * len(completion_ids)

    with pytest.raises(RewardError, match=r"'locked' cannot be sent to a reward worker.*reward_workers=0"):
        build(model_path, tmp_path, reward_funcs=locked, reward_workers=1)


def test_a_fixed_lag_has_no_replacements(tmp_path):
    with pytest.raises(ValueError, match="drop_zero_variance_groups=True with schedule='fixed_lag'"):
        A3POConfig(str(tmp_path), use_cpu=True, report_to="none", schedule="fixed_lag", drop_zero_variance_groups=True)
