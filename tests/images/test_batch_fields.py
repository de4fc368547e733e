"""The fields that were stored for each prompt make those which the processor gives for the batch."""

import pytest
import torch

from tests.images.pictured import size_of
from tests.vision import FAMILIES, messages, picture
from trl_a3po.protocol.images import TOKENS, PromptImages
from trl_a3po.rollout.batch_images import batch_fields

pytestmark = pytest.mark.long

COUNTS = [[1, 1, 1], [2, 1, 3], [1, 3]]


def conversations(counts):
    pictures = [[picture(7 * i + j, *size_of(i + 2 * j)) for j in range(count)] for i, count in enumerate(counts)]
    return [messages("w1 " * (1 + i % 3), *those) for i, those in enumerate(pictures)], pictures


def of_each(processor, conversations, pictures):
    """The tokens and the stored images of each prompt."""
    for conversation, those in zip(conversations, pictures, strict=True):
        made = processor.apply_chat_template(
            [conversation], tokenize=True, return_dict=True, add_generation_prompt=True
        )
        yield made["input_ids"][0], PromptImages.made(those, made) if those else None


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_a_batch_equal_the_processors(family, counts):
    processor = FAMILIES[family].processor()
    asked, pictures = conversations(counts)
    ids, images = zip(*of_each(processor, asked, pictures), strict=True)
    texts = [processor.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in asked]
    expected = processor(images=pictures, text=texts, padding=True, return_tensors="pt")
    found = batch_fields(images, [len(one) for one in ids], images[0])
    assert found.keys() == expected.keys() - set(TOKENS)
    for name, field in found.items():
        assert field.dtype == expected[name].dtype
        torch.testing.assert_close(field, expected[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_without_images_has_zeros_or_nothing(family):
    processor = FAMILIES[family].processor()
    asked, pictures = conversations([1, 0, 2])
    ids, images = zip(*of_each(processor, asked, pictures), strict=True)
    lengths = [len(one) for one in ids]
    with_row = batch_fields(images, lengths, images[0])
    without = batch_fields([images[0], images[2]], [lengths[0], lengths[2]], images[0])
    by_row = "pixel_attention_mask" in with_row
    for name, field in with_row.items():
        if by_row or name.endswith("token_type_ids"):
            assert not field[1].any()
            field = field[[0, 2]]
        torch.testing.assert_close(field, without[name], rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_any_images_have_the_fields_of_other_rows(family):
    processor = FAMILIES[family].processor()
    asked, pictures = conversations([1])
    [(_, images)] = of_each(processor, asked, pictures)
    found = batch_fields([None, None], [3, 4], images)
    assert found.keys() == images.fields.keys()
    for name, field in found.items():
        by_row = "pixel_attention_mask" in found or name.endswith("token_type_ids")
        assert len(field) == (2 if by_row else 0) and not field.any()
        assert field.dtype == images.fields[name].dtype
