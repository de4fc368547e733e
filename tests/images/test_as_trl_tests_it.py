"""TRL's own tests of vision-language models, with `A3POTrainer`, its engine and tiny models."""

import pytest
import torch
from peft import LoraConfig

from tests.images.pictured import pictured, with_pictures
from tests.vision import FAMILIES
from trl_a3po import A3POTrainer

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


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_train_vlm(family, tmp_path):
    _, changed, names = trained(family, tmp_path)
    assert_all_changed(family, changed, names)


@pytest.mark.long
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


@pytest.mark.long
def test_train_vlm_peft(tmp_path):
    _, changed, names = trained("qwen2_5_vl", tmp_path, peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]))
    assert changed == {name for name in names if "lora" in name}


@pytest.mark.parametrize("logs", [True, pytest.param(False, marks=pytest.mark.long)])
def test_train_vlm_log_multimodal(tmp_path, logs):
    trainer, _, _ = trained("gemma3", tmp_path, log_completions=True, log_multimodal=logs, max_steps=2)
    images = [len(images) for images in trainer._logs["images"]]
    assert images == ([1] * 2 if logs else [])
