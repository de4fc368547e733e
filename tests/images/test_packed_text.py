"""Batches of text in a run whose prompts may have images: packed where the family can be, and trained to the same
weights as padded."""

import pytest
import torch

from tests.images.pictured import pictured, with_pictures
from tests.runs import logged
from tests.vision import FAMILIES

PACKED = ("idefics3", "llava_next")
TEXT, IMAGES = [0, 0], [1, 2]  # prompts of a step, by how many images they show


def train(family, folder, **settings):
    trainer = pictured(
        family,
        folder,
        model=FAMILIES[family].model(),
        train_dataset=with_pictures([*TEXT, *IMAGES, *TEXT, *IMAGES]),
        shuffle_dataset=False,
        max_staleness=0,
        max_steps=4,
        **settings,
    )
    trainer.train()
    return trainer


@pytest.mark.long
@pytest.mark.parametrize("family", PACKED)
def test_a_batch_of_text_is_packed_and_trains_the_weights_of_a_padded_one(tmp_path, family):
    torch.manual_seed(0)
    state = FAMILIES[family].model().state_dict()
    trainers = {}
    for layout in ("auto", "off"):
        model = FAMILIES[family].model()
        model.load_state_dict(state)
        trainers[layout] = train(family, tmp_path / layout, packed_forward=layout)
    packed, padded = (logged(trainers[layout], "a3po/forward/token_ratio") for layout in ("auto", "off"))
    assert [ratio > 1 for ratio in packed] == [True, False, True, False]
    assert padded == [1, 1, 1, 1]
    trained = trainers["auto"].model.state_dict()
    for name, weight in trainers["off"].model.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-5, atol=1e-5, msg=name)
    for key in ("loss", "grad_norm", "a3po/entropy"):
        assert logged(trainers["auto"], key) == pytest.approx(logged(trainers["off"], key), rel=1e-3, abs=1e-5)


def test_the_plan_says_which_batches_are_packed(tmp_path):
    assert "padded where a batch has images, else packed" in str(pictured("idefics3", tmp_path).plan())
    assert "padded: model_type='qwen2_5_vl_text'" in str(pictured("qwen2_5_vl", tmp_path).plan())


def test_packed_rows_cannot_be_demanded_of_images(tmp_path):
    with pytest.raises(ValueError, match=r"packed_forward='on' cannot hold: prompts may have images"):
        pictured("idefics3", tmp_path, packed_forward="on")
