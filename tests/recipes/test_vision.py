"""The recipe whose small vision-language model learns on a CPU: its pictures, its rewards, and what it is taught."""

import json
import random
import re
from pathlib import Path

import pytest

from tests.recipes.test_agents import learn

VISION = Path(__file__).parents[2] / "recipes" / "vision"


@pytest.fixture(autouse=True)
def vision(monkeypatch):
    monkeypatch.syspath_prepend(VISION.parent / "agents")
    monkeypatch.syspath_prepend(VISION)


@pytest.mark.parametrize("colour", ["red", "green", "blue", "yellow"])
def test_the_middle_of_a_picture_has_the_named_colour_and_its_corner_is_grey(colour):
    from shapes import COLOURS, SHAPES, picture

    draw = random.Random(0)
    for shape in [*SHAPES] * 5:
        image = picture(colour, shape, draw)
        pixels = [image.getpixel((x, y)) for x in range(image.width) for y in range(image.height)]
        strongest = max(pixels, key=lambda pixel: max(pixel) - min(pixel))
        distance = {c: sum((a - b) ** 2 for a, b in zip(strongest, COLOURS[c], strict=True)) for c in COLOURS}
        assert min(distance, key=distance.get) == colour
        assert len(set(min(pixels, key=lambda pixel: max(pixel) - min(pixel)))) == 1


def test_a_shape_fills_the_share_of_its_box_that_geometry_says():
    from shapes import picture

    draw = random.Random(0)
    for shape, share in (("circle", 0.785), ("cross", 0.556), ("triangle", 0.5)):
        for _ in range(5):
            image = picture("red", shape, draw)
            inside = image.convert("HSV").getchannel("S").point(lambda saturation: 255 * (saturation > 100))
            left, top, right, bottom = inside.getbbox()
            filled = sum(inside.get_flattened_data()) / 255
            assert filled / ((right - left) * (bottom - top)) == pytest.approx(share, abs=0.07)


def test_rows_are_those_of_their_seed_and_no_two_pictures_are_the_same():
    from shapes import rows

    one, other = rows(50, random.Random(0)), rows(50, random.Random(0))
    assert [row["image"].tobytes() for row in one] == [row["image"].tobytes() for row in other]
    assert len({row["image"].tobytes() for row in one}) == 50


@pytest.mark.parametrize(
    ("answer", "colour", "shape"),
    [
        (" red circle", 1.0, 1.0),
        (" red cross", 1.0, 0.0),
        (" blue circle", 0.0, 1.0),
        (" circle red", 0.0, 0.0),
        (" red circle circle", 1.0, 0.0),
        (" circle", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_each_reward_looks_at_its_own_word(answer, colour, shape):
    from shapes import colour_is_right, shape_is_right

    completions = [[{"role": "assistant", "content": answer}]]
    assert colour_is_right(completions, colour=["red"], shape=["circle"]) == [colour]
    assert shape_is_right(completions, colour=["red"], shape=["circle"]) == [shape]


@pytest.mark.parametrize(("looked", "expected"), [(0.0, 0.0), (1.0, 1.0)])
def test_the_words_of_an_example_are_looked_up_as_often_as_the_recipe_says(looked, expected, monkeypatch):
    import shapes

    monkeypatch.setattr(shapes, "LOOKED", looked)
    monkeypatch.setattr(shapes, "picture", lambda colour, shape, draw: (colour, shape))
    draw = random.Random(0)
    examples = [shapes.example(draw) for _ in range(600)]
    words = [(e["completion"][0]["content"].split(), e["image"]) for e in examples]
    for place, number in ((0, len(shapes.COLOURS)), (1, len(shapes.SHAPES))):
        right = sum(said[place] == seen[place] for said, seen in words) / len(words)
        assert right == pytest.approx(expected + (1 - expected) / number, abs=0.06)


def test_the_policy_answers_in_the_format_and_is_found_again_in_a_folder(tmp_path, monkeypatch):
    import shapes
    from transformers import AutoModelForImageTextToText, AutoProcessor

    monkeypatch.setattr(shapes, "TAUGHT_STEPS", 20)
    draw = random.Random(0)
    model, processor = shapes.policy(draw, 0)
    pictures = [row["image"] for row in shapes.rows(4, draw)]
    given = shapes.answers(model, processor, pictures)
    assert all(word in {*shapes.COLOURS, *shapes.SHAPES} for answer in given for word in answer.split())
    assert model.num_parameters() < 1e6
    model.save_pretrained(tmp_path), processor.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    assert shapes.answers(*again, pictures) == given


def test_a_word_of_an_answer_is_one_token():
    from shapes import COLOURS, QUESTION, SHAPES, SIDE
    from small_vlm import small_vlm

    texts = [f"{QUESTION} {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    _, processor = small_vlm(texts, side=SIDE, seed=0)
    assert all(len(processor.tokenizer(f" {word}")["input_ids"]) == 1 for word in [*COLOURS, *SHAPES])


@pytest.mark.long
def test_the_recipe_runs(tmp_path):
    printed = learn(VISION / "shapes.py", tmp_path, "--seeds", "0", "--steps", "2", "--arms", "A3POTrainer")
    (curve,) = json.loads((tmp_path / "shapes.json").read_text())["A3POTrainer"]
    assert [point["step"] for point in curve] == [1, 2]
    assert re.search(r"of 200 held-out pictures, \d+% were right before, \d+% after", printed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_reward_rises_on_three_seeds(tmp_path):
    printed = learn(VISION / "shapes.py", tmp_path, "--arms", "A3POTrainer")
    rises = re.findall(r"reward ([\d.]+) in the first 5 steps, ([\d.]+) in the last", printed)
    assert len(rises) == 3 and all(float(last) - float(first) >= 0.3 for first, last in rises)
