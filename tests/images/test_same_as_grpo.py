"""With pictures too, `A3POTrainer` at `max_staleness=0` is `GRPOTrainer`."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests.images.pictured import PicturedGRPOTrainer, pictured, questions, with_pictures
from tests.runs import assert_same_gradients, train_recorded
from tests.vision import FAMILIES
from trl_a3po import A3POTrainer

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("same_rows_in_each_micro_batch")]

SAME = ("loss", "reward", "reward_std", "num_tokens", "entropy", "completions/mean_length", "grad_norm", "kl")
QUICK = ("qwen2_5_vl", "gemma3", "idefics3")
QUICK_OR_LONG = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]


class Prepared:
    """Keeps the first batch that TRL has prepared."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.prepared = getattr(self, "prepared", None) or dict(batch)
        return batch


class Theirs(Prepared, PicturedGRPOTrainer):
    pass


class Ours(Prepared, A3POTrainer):
    pass


def assert_same_run(family, tmp_path, *, ours=None, **settings):
    """Returns both trainers, after training."""
    theirs, mine = (
        pictured(family, tmp_path, kind, **settings, **own) for kind, own in ((Theirs, {}), (Ours, ours or {}))
    )
    expected, found = train_recorded(theirs), train_recorded(mine)
    assert_same_gradients(found, expected)
    vision = [name for name in expected[0] if "vision" in name or "visual" in name]
    assert not vision or max(expected[0][name].abs().max() for name in vision) > 1e-4
    for one, other in zip(mine.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        for name in SAME:
            assert one.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-4, abs=1e-5), name
    for name, value in theirs.prepared.items():
        if isinstance(value, torch.Tensor) and name != "old_per_token_logps":  # in place of which ours has versions
            assert mine.prepared[name].dtype == value.dtype, name
            torch.testing.assert_close(mine.prepared[name], value, msg=lambda m, name=name: f"{name}: {m}")
    return mine, theirs


@pytest.mark.parametrize("family", QUICK_OR_LONG)
def test_one_picture_in_each_row(family, tmp_path):
    mine, theirs = assert_same_run(family, tmp_path)
    assert mine.prepared["num_images"] == theirs.prepared["num_images"] == [1] * 8


@pytest.mark.parametrize("family", QUICK_OR_LONG)
def test_several_pictures_in_a_row(family, tmp_path):
    assert_same_run(family, tmp_path, train_dataset=with_pictures([2, 1, 3, 1, 2, 2, 1, 1]), max_steps=1)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("target", ["all-linear", r".*(language_model|text_model).*(q_proj|v_proj)"])
def test_lora(family, tmp_path, target):
    adapter = LoraConfig(r=4, target_modules=target, init_lora_weights=False)
    assert_same_run(family, tmp_path, peft_config=adapter, learning_rate=0.05)


OF_THE_ARRAYS = (  # how a batch is padded and split
    {"pad_to_multiple_of": 8},
    {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
)
OF_THE_LOSS = (
    {"beta": 0.1},
    {"num_iterations": 2},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *[pytest.param("qwen3_vl", settings, marks=pytest.mark.long) for settings in (*OF_THE_ARRAYS, *OF_THE_LOSS)],
        *[
            pytest.param(family, settings, marks=pytest.mark.long if settings in OF_THE_ARRAYS else pytest.mark.slow)
            for family in ("smolvlm", "llava_next")
            for settings in (*OF_THE_ARRAYS, *OF_THE_LOSS)
        ],
    ],
    ids=str,
)
def test_settings(family, tmp_path, settings):
    assert_same_run(family, tmp_path, **settings)


def test_a_processor_without_images(tmp_path):
    assert_same_run("qwen2_5_vl", tmp_path, train_dataset=Dataset.from_dict({"prompt": questions()}))
