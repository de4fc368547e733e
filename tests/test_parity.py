"""`A3POTrainer` at `max_staleness=0` is `GRPOTrainer`: same completions in, same gradients and parameters out."""

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import VOCAB, save_tiny_model, tiny_prompts
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.testing import StubEngine, scripted_completion

GENERATIONS, LENGTH = 4, 8
COMPLETE = scripted_completion(VOCAB, LENGTH)
TOLERANCE = {"sgd": 1e-5, "adamw_torch": 1e-4}
LEARNING_RATE = {"sgd": 0.3, "adamw_torch": 3e-3}


class ScriptedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose completions are those of the stub engine."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        seen: dict[tuple, int] = {}
        completions = []
        for prompt in prompt_ids:
            number = seen[tuple(prompt)] = seen.get(tuple(prompt), -1) + 1
            completions.append(COMPLETE(prompt, number))
        return completions, None


class GradientRecorder(TrainerCallback):
    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        self.gradients.append(named)


def reward(completion_ids, target, **kwargs):
    return [(sum(ids) + t) % 11 / 10 for ids, t in zip(completion_ids, target, strict=True)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def same_rows_in_each_micro_batch(monkeypatch):
    """TRL shuffles a generation batch with the global generator, which a model's initialisation also draws from."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)


def run(trainer_class, config_class, model_path, tmp_path, lora, settings):
    recorder = GradientRecorder()
    args = config_class(
        output_dir=str(tmp_path / trainer_class.__name__),
        per_device_train_batch_size=4,
        num_generations=GENERATIONS,
        max_completion_length=LENGTH,
        max_steps=4,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_bias_correction_kl=False,
        model_init_kwargs={"dtype": "float32"},
        **settings,
    )
    torch.manual_seed(3)  # the adapter's initialisation
    trainer = trainer_class(
        model_path,
        reward,
        args=args,
        train_dataset=tiny_prompts(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None,
        callbacks=[recorder],
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    after = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return before, after, recorder.gradients


def assert_parity(model_path, tmp_path, *, lora, optim, ours=None, **settings):
    settings |= {"optim": optim, "learning_rate": LEARNING_RATE[optim]}
    before, expected, their_gradients = run(ScriptedGRPOTrainer, GRPOConfig, model_path, tmp_path, lora, settings)
    mine = {"max_staleness": 0, "engine": StubEngine(COMPLETE), **(ours or {})}
    started, found, our_gradients = run(A3POTrainer, A3POConfig, model_path, tmp_path, lora, settings | mine)
    assert all(torch.equal(before[name], started[name]) for name in before)
    assert max((expected[name] - before[name]).abs().max() for name in before) > 100 * TOLERANCE[optim]
    assert len(our_gradients) == len(their_gradients) == 4
    for theirs, mine in zip(their_gradients, our_gradients, strict=True):
        assert theirs.keys() == mine.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=TOLERANCE[optim])


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
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
