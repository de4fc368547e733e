"""TRL's own tests of vision-language models, with `A3POTrainer`, its engine and tiny models."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests.images.pictured import pictured, questions, with_pictures
from tests.images.talking import ids, look, results_in, talking_processor
from tests.vision import FAMILIES
from trl_a3po import A3POTrainer
from trl_a3po.testing import StubEngine

pytestmark = pytest.mark.long

AS_THERE = {
    "optim": "adamw_torch",
    "learning_rate": 0.1,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "max_completion_length": 8,
    "max_staleness": 4,
    "max_steps": 4,
    "engine": "transformers",
}


def longer_is_better(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def trained(family, tmp_path, **settings):
    trainer = pictured(family, tmp_path, A3POTrainer, **(AS_THERE | {"reward_funcs": longer_is_better} | settings))
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] is not None
    after = dict(trainer.model.named_parameters())
    return trainer, {name for name, value in before.items() if not torch.equal(after[name], value)}, before.keys()


def without_gradient(family):
    """Weights that the features of the family's tower do not pass through."""
    return {"llava_next": ("post_layernorm",), "gemma3": ("vision_tower.head",)}.get(family, ())


def assert_all_changed(family, changed, names):
    still = {name for name in names - changed if not any(part in name for part in without_gradient(family))}
    assert not still


SLOW = pytest.mark.slow  # test_same_as_grpo.py holds the gradients of such runs to those of GRPOTrainer


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.long if name == "gemma3" else SLOW) for name in FAMILIES]
)
def test_train_vlm(family, tmp_path):
    _, changed, names = trained(family, tmp_path)
    assert_all_changed(family, changed, names)


@SLOW
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {"pad_to_multiple_of": 7}),
        ("qwen2_5_vl", {"beta": 0.1}),
        ("qwen2_5_vl", {"steps_per_generation": 2}),
        ("qwen2_5_vl", {"train_dataset": with_pictures([2, 1, 3, 2])}),
    ],
    ids=["pad_to_multiple_of", "beta_non_zero", "importance_sampling", "multi_image"],
)
def test_train_vlm_with(family, settings, tmp_path):
    _, changed, names = trained(family, tmp_path, **settings)
    assert_all_changed(family, changed, names)


@SLOW
def test_train_vlm_peft(tmp_path):
    _, changed, names = trained("qwen2_5_vl", tmp_path, peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]))
    assert changed == {name for name in names if "lora" in name}


@pytest.mark.parametrize("logs", [True, pytest.param(False, marks=pytest.mark.long)])
def test_train_vlm_log_multimodal(tmp_path, logs):
    trainer, _, _ = trained("gemma3", tmp_path, log_completions=True, log_multimodal=logs, max_steps=2)
    images = [len(images) for images in trainer._logs["images"]]
    assert images == ([1] * 2 if logs else [])


@pytest.mark.filterwarnings("ignore:The tokenizer has a legacy")
@pytest.mark.parametrize(
    "family", [name if name == "qwen3_vl" else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_train_with_tools_multimodal_response(family, tmp_path):
    def complete(prompt_ids, number):
        first = "w9 <eos>" if number else "call look w2 <eos>"
        return ids("w8 w7 <eos>" if results_in(prompt_ids) else first)

    trainer, changed, names = trained(
        family, tmp_path, engine=StubEngine(complete), tools=[look], processing_class=talking_processor(family),
        train_dataset=Dataset.from_dict({"prompt": questions()}), max_completion_length=60,
        reward_funcs=lambda completion_ids, **kwargs: [float(len(tokens)) for tokens in completion_ids],
    )  # fmt: skip
    last = [entry for entry in trainer.state.log_history if "tools/call_frequency" in entry][-1]
    assert last["tools/call_frequency"] == pytest.approx(1 / 2)
    assert last["tools/failure_frequency"] == pytest.approx(0.0)
    assert_all_changed(family, changed, names)
