"""`A3POTrainer` at `max_staleness=0` is `GRPOTrainer`: same completions in, same gradients and parameters out."""

import pytest
import torch
from peft import LoraConfig

from tests.runs import ScriptedGRPOTrainer, assert_same_gradients, build, train_recorded
from trl_a3po import A3POTrainer

TOLERANCE = {"sgd": 1e-5, "adamw_torch": 1e-4}
LEARNING_RATE = {"sgd": 0.3, "adamw_torch": 3e-3}


pytestmark = pytest.mark.usefixtures("same_rows_in_each_micro_batch")


def run(model_path, tmp_path, trainer_class, lora, settings):
    peft_config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None
    trainer = build(model_path, tmp_path, trainer_class, peft_config=peft_config, **settings)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    gradients = train_recorded(trainer)
    after = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return before, after, gradients


def assert_parity(model_path, tmp_path, *, lora, optim, ours=None, **settings):
    settings |= {"optim": optim, "learning_rate": LEARNING_RATE[optim]}
    before, expected, their_gradients = run(model_path, tmp_path, ScriptedGRPOTrainer, lora, settings)
    started, found, our_gradients = run(model_path, tmp_path, A3POTrainer, lora, settings | (ours or {}))
    assert all(torch.equal(before[name], started[name]) for name in before)
    assert max((expected[name] - before[name]).abs().max() for name in before) > 100 * TOLERANCE[optim]
    assert len(our_gradients) == 4
    assert_same_gradients(our_gradients, their_gradients)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=TOLERANCE[optim])


@pytest.mark.parametrize("optim", ["sgd", pytest.param("adamw_torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradients_and_parameters_equal_those_of_grpo(model_path, tmp_path, lora, beta, loss_type, optim):
    assert_parity(
        model_path, tmp_path, lora=lora, optim=optim, beta=beta, loss_type=loss_type, gradient_accumulation_steps=2
    )


@pytest.mark.parametrize("method", ["loglinear", "recompute"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_two_iterations_over_a_batch_equal_those_of_grpo(model_path, tmp_path, lora, method):
    assert_parity(
        model_path,
        tmp_path,
        lora=lora,
        optim="sgd",
        num_iterations=2,
        gradient_accumulation_steps=2,
        ours={"proximal_method": method},
    )


def test_more_slices_than_accumulation_steps_equal_those_of_grpo(model_path, tmp_path):
    """steps_per_generation > gradient_accumulation_steps: one batch feeds two optimizer steps without iterating."""
    assert_parity(model_path, tmp_path, lora=False, optim="sgd", steps_per_generation=4, gradient_accumulation_steps=2)


def test_several_batches_in_one_optimizer_step_equal_those_of_grpo(model_path, tmp_path):
    assert_parity(model_path, tmp_path, lora=False, optim="sgd", steps_per_generation=1, gradient_accumulation_steps=3)
