"""`schedule="periodic"` (Periodic Asynchrony, arXiv 2511.18871): trained in the order in which groups are finished,
while others are still sampled, and equal to the synchronous step."""

import itertools
import threading

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import TrainerCallback

from tests.periodic import (
    GROUPS,
    MICRO_STEPS,
    ShufflingEngine,
    TakesRecorder,
    float64_throughout,
    prompts_of_one_length,
    trained,
)
from tests.runs import COMPLETE, GENERATIONS, assert_same_gradients, build, complete_or_stop, logged
from tests.tiny import save_tiny_model
from trl_a3po import A3POConfig
from trl_a3po.config.check_schedule import check_periodic
from trl_a3po.errors import GenerationFailed, RewardError
from trl_a3po.protocol.engine import GroupFailed
from trl_a3po.protocol.records import Rejection
from trl_a3po.testing import StubEngine


class HoldingEngine(StubEngine):
    """Keeps the last group of the first period until `release` is set."""

    def __init__(self):
        super().__init__(COMPLETE)
        self.release = threading.Event()

    def wait(self, timeout):
        held = GROUPS - 1
        with self._lock:
            if not self.release.is_set():
                kept = [event for event in self._events if event.request_id == held]
                self._events = [event for event in self._events if event.request_id != held]
                events = super().wait(timeout)
                self._events += kept
                return events
        return super().wait(timeout)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    float64_throughout(monkeypatch.setattr)


def trained_prompts(trainer) -> list[int]:
    return sorted(itertools.chain(*trainer.taken))


def assert_equals_sync(model_path, folder, tolerance, seeds=(1,), complete=COMPLETE, **settings):
    sync, expected = trained(model_path, folder / "sync", "sync", engine=StubEngine(complete), **settings)
    assert max(gradient.abs().max() for gradient in expected[0].values()) > 1e-4
    orders = set()
    for seed in seeds:
        engine = ShufflingEngine(seed, complete)
        mine, found = trained(model_path, folder / str(seed), engine=engine, **settings)
        assert_same_gradients(found, expected, rtol=0, atol=tolerance)
        for name in ("grad_norm", "loss", "reward"):
            assert logged(mine, name) == pytest.approx(logged(sync, name), rel=1e-5, abs=1e-7), name
        assert min(logged(mine, "grad_norm")) > mine.args.max_grad_norm  # clipped at every step
        for ours, theirs in zip(mine.model.parameters(), sync.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
        assert [len(indices) for indices in mine.taken] == [GROUPS // MICRO_STEPS] * MICRO_STEPS * 2
        assert trained_prompts(mine) == trained_prompts(sync) == list(range(2 * GROUPS))
        orders.add(str(mine.taken))
    return orders


def test_any_order_of_arrival_gives_the_gradients_of_sync(model_path, tmp_path):
    orders = assert_equals_sync(model_path, tmp_path, 1e-10, (1, 2, 3), train_dataset=prompts_of_one_length())
    assert len(orders) > 1


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo"])
def test_other_loss_types_give_the_gradients_of_sync(model_path, tmp_path, loss_type):
    data = prompts_of_one_length()
    assert_equals_sync(model_path, tmp_path, 1e-10, loss_type=loss_type, train_dataset=data)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_kl_term_is_that_of_sync(model_path, tmp_path, lora):
    assert_equals_sync(model_path, tmp_path, 1e-10, lora=lora, beta=0.1, train_dataset=prompts_of_one_length())


def test_prompts_of_many_lengths_give_the_gradients_of_sync(model_path, tmp_path):
    assert_equals_sync(model_path, tmp_path, 1e-6)


def test_truncated_completions_that_do_not_count_give_the_gradients_of_sync(model_path, tmp_path):
    settings = {"mask_truncated_completions": True, "train_dataset": prompts_of_one_length()}
    assert_equals_sync(model_path, tmp_path, 1e-10, complete=complete_or_stop, **settings)


class HeldUntilTraining(TrainerCallback):
    """Lets the last group go when a micro-step's backward is done, and notes which groups were trained until then."""

    def __init__(self, engine):
        self.engine = engine

    def on_substep_end(self, args, state, control, **kwargs):
        self.engine.release.set()


def test_training_begins_before_the_last_group_is_finished_and_waits_for_it(model_path, tmp_path):
    engine = HoldingEngine()
    settings = {"stall_timeout": 20, "callbacks": [HeldUntilTraining(engine)], "max_steps": 1}
    trainer, gradients = trained(model_path, tmp_path, engine=engine, **settings)
    assert engine.release.is_set()
    assert trained_prompts(trainer) == list(range(GROUPS)) and GROUPS - 1 in trainer.taken[-1]
    assert len(gradients) == 1


def test_the_whole_period_is_dispatched_at_its_publish_and_nothing_of_the_next(model_path, tmp_path):
    engine = ShufflingEngine(0)
    seen = []

    class Dispatched(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            seen.append(([request.noise_key for request in engine.requests], engine.published))

    engine.asked_for = 2 * GROUPS
    trained(model_path, tmp_path, engine=engine, callbacks=[Dispatched()])
    first, second = (list(range(n * GROUPS)) for n in (1, 2))
    assert [keys for keys, _ in seen] == [first, first, second, second]
    assert seen[-1][1] == [0, 1]


class FailingEngine(StubEngine):
    """Never samples the period's fourth prompt."""

    def submit(self, requests):
        super().submit([request for request in requests if request.noise_key != 3])
        lost = [request.request_id for request in requests if request.noise_key == 3]
        with self._lock:
            self._events += [GroupFailed(request_id, "no memory") for request_id in lost]


def test_a_failed_rollout_raises_and_takes_no_step(model_path, tmp_path):
    with pytest.raises(GenerationFailed, match="Prompt 3 failed 3 times"):
        trained(model_path, tmp_path, engine=FailingEngine(COMPLETE))


def test_a_rejected_group_is_replaced_as_under_sync(model_path, tmp_path):
    def reject(group):
        return Rejection("not this one", "accept it") if group.prompt.index == 2 else None

    settings = {"on_group": reject, "train_dataset": prompts_of_one_length(), "max_steps": 1}
    sync, expected = trained(model_path, tmp_path / "sync", "sync", engine=StubEngine(COMPLETE), **settings)
    engine = ShufflingEngine(3)
    engine.asked_for = 1  # in its place
    mine, found = trained(model_path, tmp_path / "mine", engine=engine, **settings)
    assert trained_prompts(mine) == trained_prompts(sync) == [0, 1, 3, 4, 5, 6]
    assert_same_gradients(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("method, passes", [("loglinear", 2), ("recompute", 3)])
def test_every_micro_batch_has_its_policy_old_and_reference_pass_as_it_arrives(
    model_path, tmp_path, lora, method, passes
):
    """The engine's log-probs save the old policy's; under LoRA the reference is the policy without its adapter."""
    calls = []

    class Counting(TakesRecorder):
        def _take(self):
            calls.append("take")
            return super()._take()

        def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
            grads = torch.is_grad_enabled()
            calls.append((grads, model is self.ref_model, len(input_ids)))
            if lora and not grads:
                self.adapters_off = [*getattr(self, "adapters_off", []), disables_adapters(self.model)]
            return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)

    settings = {"beta": 0.1, "proximal_method": method, "max_steps": 1}
    mine, _ = trained(model_path, tmp_path, lora=lora, trainer_class=Counting, engine=ShufflingEngine(0), **settings)
    rows = GROUPS // MICRO_STEPS * GENERATIONS
    old = [(False, False, rows)] if method == "recompute" else []
    micro_step = ["take", *old, (False, not lora, rows), (True, False, rows)]
    assert calls == MICRO_STEPS * micro_step and len(micro_step) == 1 + passes
    if lora:
        assert mine.ref_model is None
        assert mine.adapters_off == MICRO_STEPS * ([False] * len(old) + [True])


def disables_adapters(model) -> bool:
    return all(module.disable_adapters for module in model.modules() if isinstance(module, BaseTunerLayer))


def test_rewards_are_asked_of_the_period_not_of_a_micro_step(model_path, tmp_path):
    """A reward function that passes over some prompts may leave a micro-step without a reward, but not a period."""

    def some(completion_ids, target, **kwargs):
        return [0.5 if t > 1 else None for t in target]

    def none(completion_ids, **kwargs):
        return [None] * len(completion_ids)

    settings = {"max_steps": 1, "shuffle_dataset": False, "train_dataset": prompts_of_one_length()}
    trained(model_path, tmp_path, engine=StubEngine(COMPLETE), reward_funcs=some, **settings)
    with pytest.raises(RewardError, match="No completion of a generation batch got a reward"):
        trained(model_path, tmp_path, engine=StubEngine(COMPLETE), reward_funcs=none, **settings)


def test_the_completions_table_holds_the_period_with_its_weights(model_path, tmp_path):
    settings = {"log_completions": True, "max_steps": 1}
    mine, _ = trained(model_path, tmp_path, engine=ShufflingEngine(1), **settings)
    assert len(mine._logs["prompt"]) == GROUPS * GENERATIONS
    assert list(mine._logs["extra"]["w"]) == pytest.approx([1.0] * GROUPS * GENERATIONS, abs=1e-4)


def test_seconds_are_those_of_a_period(model_path, tmp_path):
    lengths = {}

    class Kept(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            lengths.update({name: len(values) for name, values in other._metrics["train"].items()})

    from_two_steps = {"a3po/time/wait": 2, "a3po/time/publish": 2, "a3po/time/reward": 2, "a3po/time/idle_share": 1}
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, "max_steps": 2}
    other = build(model_path, tmp_path, schedule="periodic", logging_steps=5, callbacks=[Kept()], **settings)
    other.train()
    assert {name: lengths[name] for name in from_two_steps} == from_two_steps


REFUSED = [
    ({"num_iterations": 2}, "set num_iterations=1"),
    ({"steps_per_generation": 6}, "set steps_per_generation=3"),
    ({"steps_per_generation": 1}, "set steps_per_generation=3"),
    ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, "set per_device_train_batch_size"),
    ({"weight_sync_steps": 2}, "set weight_sync_steps=1"),
    ({"loss_type": "bnpo"}, "set loss_type='dapo'"),
    ({"scale_rewards": "batch"}, "set scale_rewards='group'"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "set multi_objective_aggregation='sum_then_normalize'"),
    ({"top_entropy_quantile": 0.5}, "set top_entropy_quantile=1.0"),
    ({"entropy_coef": 0.01}, "set entropy_coef=0.0"),
    ({"use_adaptive_entropy": True}, "set use_adaptive_entropy=False"),
]


def periodic_config(**settings) -> A3POConfig:
    base = {"output_dir": "unused", "schedule": "periodic", "use_cpu": True, "report_to": "none", "num_generations": 4}
    return A3POConfig(**{**base, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, **settings})


@pytest.mark.parametrize("settings, instead", REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_what_would_not_be_the_synchronous_step_is_refused(settings, instead):
    with pytest.raises(ValueError, match=r"^schedule='periodic' [^\n]*") as error:
        periodic_config(**settings)
    assert instead in str(error.value) and str(error.value).endswith(".")


def test_deepspeed_is_refused_for_the_losses_that_need_a_scaling_of_the_gradients():
    with pytest.raises(ValueError, match=r"loss_type='dapo'.*DeepSpeed.*set loss_type='dr_grpo' or 'grpo'"):
        check_periodic(periodic_config(), deepspeed=True, aux_loss=0.0)
    check_periodic(periodic_config(loss_type="grpo"), deepspeed=True, aux_loss=0.0)
    check_periodic(periodic_config(gradient_accumulation_steps=1), deepspeed=True, aux_loss=0.0)


def test_an_auxiliary_loss_of_the_micro_batch_is_refused():
    with pytest.raises(ValueError, match=r"set router_aux_loss_coef=0\.0"):
        check_periodic(periodic_config(), deepspeed=False, aux_loss=0.001)


def test_the_plan_says_how_a_batch_is_trained():
    plan = periodic_config().plan()
    assert "6 prompts x 4 completions" in plan and "periodic, at most 0 optimizer steps stale" in plan
    assert "a batch is trained 2 finished prompts at a time" in plan
