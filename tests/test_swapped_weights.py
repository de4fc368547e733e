"""Weights that a callback puts in place for an evaluation, or for good: evaluations and training sample from the
weights that are there at that moment, whatever the version's number is.

The learning rate is 0, so that every importance ratio of a run that samples from the trained weights is 1.
"""

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.runs import COMPLETE, build, logged
from tests.tiny import tiny_config, tiny_prompts, tiny_tokenizer
from trl_a3po import A3POTrainer
from trl_a3po.testing import StubEngine, completion_logps

pytestmark = pytest.mark.long


class Watched(A3POTrainer):
    """Keeps how far the log-probs of the completions of each evaluation batch are from those of the model as it was
    during the evaluation."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.evaluation_gaps: list[float] = []

    def _sample_evaluation(self, rows):
        sampled = super()._sample_evaluation(rows)
        for group, number in self._current_batch.rows:
            rollout = group.rollouts[number]
            own = completion_logps(self.model, group.prompt.token_ids, rollout.token_ids, 1.0)
            self.evaluation_gaps.append((own - torch.tensor(rollout.logps)).abs().max().item())
        return sampled


def averaged(model) -> dict[str, torch.Tensor]:
    """Other weights, which stand for an average."""
    torch.manual_seed(0)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    return {
        name: weight + 0.1 * torch.randn_like(weight) if name in trained else weight.clone()
        for name, weight in model.state_dict().items()
    }


@contextlib.contextmanager
def copied(model):
    mine = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        weight.data.copy_(averaged(model)[name])
    yield
    for name, weight in model.named_parameters():
        weight.data.copy_(mine[name])


@contextlib.contextmanager
def replaced(model):
    mine, other = {name: weight.data for name, weight in model.named_parameters()}, averaged(model)
    for name, weight in model.named_parameters():
        weight.data = other[name]
    yield
    for name, weight in model.named_parameters():
        weight.data = mine[name]


@contextlib.contextmanager
def loaded(model):
    mine = {name: weight.clone() for name, weight in model.state_dict().items()}
    average = AveragedModel(model)
    average.module.load_state_dict(averaged(model))
    model.load_state_dict(average.module.state_dict())
    yield
    model.load_state_dict(mine)


@contextlib.contextmanager
def other_adapter(model):
    model.set_adapter("average")
    yield
    model.set_adapter("default")


@contextlib.contextmanager
def without_adapter(model):
    with model.disable_adapter():
        yield


@contextlib.contextmanager
def merged_adapter(model):
    model.merge_adapter()
    yield
    model.unmerge_adapter()


class Swaps(TrainerCallback):
    """Evaluates in a swap after the second step, and, where `twice`, before and after the swap too."""

    def __init__(self, swap, twice=False):
        self.swap = swap
        self.twice = twice

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step != 2:
            return
        if self.twice:
            self.trainer.evaluate()
        with self.swap(model):
            self.trainer.evaluate()
            self.trainer.evaluate()
        if self.twice:
            self.trainer.evaluate()


def trained(model, folder, swap, *, twice=False, **settings) -> Watched:
    callback = Swaps(swap, twice)
    trainer = build(
        model, folder, Watched, callbacks=[callback], eval_dataset=tiny_prompts(4), per_device_eval_batch_size=4,
        **{"learning_rate": 0.0, "max_steps": 5, "max_staleness": 2, **settings},
    )  # fmt: skip
    callback.trainer = trainer
    trainer.train()
    return trainer


def assert_true(trainer: Watched) -> None:
    assert max(trainer.evaluation_gaps) < 1e-4
    ratios = logged(trainer, "a3po/rho/min") + logged(trainer, "a3po/rho/max")
    assert ratios and max(abs(ratio - 1) for ratio in ratios) < 1e-3


@pytest.mark.parametrize("twice", [False, True], ids=["", "evaluated before and after"])
@pytest.mark.parametrize("swap", [copied, replaced, loaded])
def test_an_evaluation_samples_from_the_average_and_training_from_the_trained_weights(
    model_path, tmp_path, swap, twice
):
    assert_true(trained(model_path, tmp_path, swap, twice=twice))


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "fixed_lag", "max_staleness": 1},
        {"max_staleness": 4, "weight_sync_steps": 3},
        {"max_staleness": 0, "num_iterations": 3},
        {"schedule": "periodic"},
    ],
    ids=lambda settings: ", ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_every_schedule_goes_back_to_the_trained_weights(model_path, tmp_path, settings):
    trainer = trained(model_path, tmp_path, copied, **settings)
    assert_true(trainer)


def adapted() -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    config = LoraConfig(r=4, target_modules="all-linear")
    model = get_peft_model(model, config)
    model.add_adapter("average", config)
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            weight.data.normal_(std=0.3)
    return model


@pytest.mark.parametrize("sync", ["adapter", pytest.param("merged", marks=pytest.mark.long)])
@pytest.mark.parametrize("swap", [copied, other_adapter, without_adapter, merged_adapter])
def test_adapters_may_be_switched_for_an_evaluation(model_path, tmp_path, swap, sync):

    assert_true(trained(adapted(), tmp_path, swap, lora_sync=sync, processing_class=tiny_tokenizer()))


def test_what_the_engine_cannot_be_switched_to_is_refused(tmp_path):

    model = adapted()
    model.delete_adapter("average")
    model.add_adapter("average", LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(ValueError, match=r"active adapter is 'average', whose r=2, .* 'default', whose r=4.*merged"):
        trained(model, tmp_path, other_adapter, processing_class=tiny_tokenizer())


def test_another_model_in_the_place_of_the_trained_one_is_refused(model_path, tmp_path):
    @contextlib.contextmanager
    def replaced_model(model):
        trainer.model, mine = AveragedModel(model).module, trainer.model
        yield
        trainer.model = mine

    callback = Swaps(replaced_model)
    trainer = build(
        model_path, tmp_path, callbacks=[callback], eval_dataset=tiny_prompts(4), per_device_eval_batch_size=4
    )
    callback.trainer = trainer
    with pytest.raises(ValueError, match=r"trainer.model was replaced during training.*load the weights"):
        trainer.train()


def reset(model):
    torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight)


def clipped(model):
    for weight in model.parameters():
        weight.data.clamp_(-0.2, 0.2)


def frozen_changed(model):
    model.model.embed_tokens.weight.data += 0.1


class Changes(TrainerCallback):
    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            self.change(model)


@pytest.mark.parametrize("change", [reset, clipped, frozen_changed])
def test_what_a_callback_changes_for_good_is_sampled_from(model_path, tmp_path, change):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, tie_word_embeddings=False)
    model.model.embed_tokens.requires_grad_(False)

    trainer = build(model, tmp_path, learning_rate=0.0, callbacks=[Changes(change)], processing_class=tiny_tokenizer())
    trainer.train()
    ratios = logged(trainer, "a3po/rho/min") + logged(trainer, "a3po/rho/max")
    assert max(abs(ratio - 1) for ratio in ratios) < 1e-3


class Freezes(TrainerCallback):
    """Trains the first layer only until the second step, or only from then on."""

    def __init__(self, first):
        self.first = first

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.model.layers[0].requires_grad_(self.first)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            model.model.layers[0].requires_grad_(not self.first)


@pytest.mark.parametrize("first", [True, False], ids=["frozen", "trained"])
def test_a_layer_that_is_frozen_or_trained_from_the_middle_on_is_sent(model_path, tmp_path, first):
    engine = StubEngine(COMPLETE)
    trainer = build(model_path, tmp_path, callbacks=[Freezes(first)], engine=engine, max_steps=6)
    trainer.train()
    assert len(logged(trainer, "a3po/engine_gap/max")) == 6
    assert max(logged(trainer, "a3po/engine_gap/max")) < 1e-3
