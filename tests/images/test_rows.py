"""Rows with images: what a column and a message may hold, what reward functions receive, which rows are refused."""

import io
import re

import pytest
from datasets import Dataset, Features, Image, IterableDataset, Value
from peft import LoraConfig
from PIL import Image as PILImage
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.images.pictured import (
    COMPLETE,
    MESSAGES,
    PicturedGRPOTrainer,
    pictured,
    questions,
    reward,
    with_one_picture,
    with_pictures,
)
from tests.runs import TakeRecorder, logged
from tests.tiny import tiny_tokenizer
from tests.vision import FAMILIES, messages, picture
from trl_a3po.session.evaluation import EvaluatedRows
from trl_a3po.session.prompt_images import UnreadableImage, opened_image
from trl_a3po.testing import StubEngine

pytestmark = pytest.mark.long

FEW = {"max_steps": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}  # one group


def as_bytes(image):
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def stream(*rows):
    return IterableDataset.from_generator(lambda: iter(rows))


def taken_images(trainer):
    return [group.prompt.images for _, group in trainer.groups]


def test_reward_functions_receive_what_grpo_gives_them(tmp_path):
    seen = {}

    def judge(completions, prompts, image, completion_ids, **kwargs):
        seen.setdefault(kind, []).extend(zip(prompts, completions, image, strict=True))
        assert set(kwargs) - {"trainer_state", "log_extra", "log_metric", "environments"} == set()
        return [0.5 * len(ids) for ids in completion_ids]

    settings = {"reward_funcs": judge, "shuffle_dataset": False, **FEW}
    for kind in (PicturedGRPOTrainer, TakeRecorder):
        pictured("gemma3", tmp_path, kind, **settings).train()
    theirs, ours = seen[PicturedGRPOTrainer], seen[TakeRecorder]
    assert len(theirs) == len(ours) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert one == other  # images are equal where their pixels are
    assert ours[0][0][0]["content"][0] == {"type": "image", "image": ours[0][2]}


@pytest.mark.parametrize("kind", ["PIL", "bytes", "path", "in the messages", "places in the messages"])
def test_one_image_in_each_of_its_forms(tmp_path, kind):
    image = picture(3)
    image.save(tmp_path / "picture.png")
    text = [{"type": "text", "text": "w1 w2"}]
    row = {
        "PIL": {"prompt": questions(1)[0], "image": image},
        "bytes": {"prompt": questions(1)[0], "image": {"bytes": as_bytes(image), "path": None}},
        "path": {"prompt": questions(1)[0], "images": [str(tmp_path / "picture.png")]},
        "in the messages": {"prompt": messages("w1 w2", image)},
        "places in the messages": {
            "prompt": [{"role": "user", "content": [{"type": "image"}, *text]}],
            "images": [image],
        },
    }[kind]
    trainer = pictured("qwen3_vl", tmp_path, TakeRecorder, train_dataset=stream(row), **FEW)
    trainer.train()
    [images] = taken_images(trainer)
    assert images.images[0].tobytes() == image.tobytes()
    assert max(logged(trainer, "a3po/engine_gap/max")) < 1e-4


def test_every_prompt_is_prepared_once(tmp_path, monkeypatch):
    processor, prepared = FAMILIES["qwen2_5_vl"].processor(), []
    call = type(processor).__call__
    monkeypatch.setattr(
        type(processor),
        "__call__",
        lambda self, *args, **kwargs: prepared.append(kwargs) or call(self, *args, **kwargs),
    )
    trainer = pictured("qwen2_5_vl", tmp_path, TakeRecorder, processing_class=processor, delivery_check_steps=0)
    at_construction = len(prepared)
    trainer.train()
    assert len(prepared) - at_construction == len(trainer.groups) == 4


BROKEN = {"prompt": questions(1)[0], "image": {"bytes": b"no image", "path": None}}
LEFT_OUT = {
    "broken": (
        BROKEN,
        "An image cannot be read from its bytes: repair or remove it. It has no format that PIL knows.",
    ),
    "address": (
        {"prompt": questions(1)[0], "image": "https://example.com/a.png"},
        "An image is given as the address 'https://example.com/a.png', which is not fetched during training",
    ),
    "address in a message": (
        {"prompt": [{"role": "user", "content": [{"type": "image", "url": "https://example.com/a.png"}]}]},
        "A message shows the image 'https://example.com/a.png' by its address",
    ),
    "array": ({"prompt": questions(1)[0], "image": [[0]]}, "An image is a list: give a PIL image"),
    "the image token in a text": (
        {"prompt": [{"role": "user", "content": "w1 <|image_pad|> w2"}], "image": picture(1)},
        "The processor refuses a prompt and its images: The total number of <|image_pad|> tokens in the prompts",
    ),
    "too few places": (
        {"prompt": messages("w1"), "images": [picture(1)]},
        "The row has 1 images, but its messages have places for 0",
    ),
}


@pytest.mark.parametrize("which", LEFT_OUT)
def test_a_row_of_a_stream_whose_images_cannot_be_used_is_left_out(tmp_path, caplog, which):
    row, words = LEFT_OUT[which]
    good = {"prompt": questions(1)[0], "image": picture(1, 16, 16)}
    trainer = pictured(
        "qwen2_5_vl", tmp_path, TakeRecorder, train_dataset=stream(row, good, good), shuffle_dataset=False, **FEW
    )
    trainer.train()
    assert f"Row 0 that was read from the stream is left out. {words}" in caplog.text
    assert [group.prompt.index for _, group in trainer.groups] == [1]


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"bytes": None, "path": "gone.png"}, "An image cannot be read from 'gone.png'"),
        ({"bytes": b"no image", "path": None}, "An image cannot be read from its bytes"),
        ({"bytes": None, "path": "https://example.com/a.png"}, "An image is given as the address"),
    ],
    ids=["gone", "broken", "address"],
)
def test_a_row_of_a_decoded_column_whose_image_cannot_be_read_is_left_out(tmp_path, caplog, stored, words):
    good = [{"bytes": as_bytes(picture(number, 16, 16)), "path": None} for number in range(2)]
    features = Features({"prompt": MESSAGES, "image": Image()})
    dataset = Dataset.from_dict({"prompt": questions(3), "image": [good[0], stored, good[1]]}, features=features)
    trainer = pictured(
        "qwen2_5_vl", tmp_path, TakeRecorder, train_dataset=dataset, shuffle_dataset=False, **(FEW | {"max_steps": 2})
    )
    trainer.train()
    assert f"Row 1 of train_dataset is left out. {words}" in caplog.text
    assert [group.prompt.example["prompt"] for _, group in trainer.groups] == [questions(3)[0], questions(3)[2]]


def with_files(folder, rows, missing, decoded=True):
    """Rows with the path of a file each, of which some are missing."""
    for number in range(rows):
        if number not in missing:
            picture(number, 16, 16).save(folder / f"{number}.png")
    features = Features({"prompt": MESSAGES, "image": Image(decode=decoded)})
    paths = [str(folder / f"{number}.png") for number in range(rows)]
    return Dataset.from_dict({"prompt": questions(rows), "image": paths}, features=features)


@pytest.mark.parametrize("kind", ["decoded", "as stored", "stream", "stream as stored"])
def test_the_first_row_is_left_out_as_any_other(tmp_path, kind):
    data = with_files(tmp_path, 5, {0, 2}, "stored" not in kind)
    data = data.to_iterable_dataset() if "stream" in kind else data
    settings = {"train_dataset": data, "shuffle_dataset": False, **(FEW | {"max_steps": 3})}
    trainer = pictured("qwen2_5_vl", tmp_path, TakeRecorder, **settings)
    assert ("each, as in the first 4 rows" in trainer.plan()) == ("stream" not in kind)
    trainer.train()
    assert [group.prompt.index for _, group in trainer.groups] == [1, 3, 4]


def test_a_folder_of_images_that_is_gone_is_said_at_construction(tmp_path):
    with pytest.raises(ValueError, match=r"None of the first 8 rows .* Row 0: An image cannot be read from .*0\.png"):
        pictured("qwen2_5_vl", tmp_path, train_dataset=with_files(tmp_path, 9, range(9)))


def test_a_folder_of_images_that_disappears_is_the_reason_that_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_a3po.rollout.prompt_stream.LEFT_OUT_IN_A_ROW", 20)
    data = with_files(tmp_path, 5, ())

    def deletes_the_images(completion_ids, **kwargs):
        for path in tmp_path.glob("*.png"):
            path.unlink()
        return reward(completion_ids)

    settings = {
        "train_dataset": data,
        "reward_funcs": deletes_the_images,
        "max_staleness": 0,
        **(FEW | {"max_steps": 9}),
    }
    trainer = pictured("qwen2_5_vl", tmp_path, **settings)
    words = r"20 rows in a row are left out \(20 with an unreadable image\).* An image cannot be read from .*png"
    with pytest.raises(ValueError, match=words):
        trainer.train()


@pytest.mark.parametrize("decoded", [True, False], ids=["decoded", "as stored"])
def test_a_row_of_an_evaluation_whose_image_cannot_be_read_is_named(tmp_path, decoded):
    trainer = pictured(
        "qwen2_5_vl", tmp_path, eval_dataset=with_files(tmp_path, 4, {2}, decoded), eval_strategy="steps",
        eval_steps=1, per_device_eval_batch_size=8, **FEW,
    )  # fmt: skip
    words = (
        r"Row 2 of the evaluation dataset: An image cannot be read from .*2\.png.* eval_on_start=True finds such rows"
    )
    with pytest.raises(ValueError, match=words):
        trainer.train()


def test_a_row_of_an_evaluation_that_is_streamed_has_its_number_in_the_order_of_trl(tmp_path):
    data = with_files(tmp_path, 4, {2}).to_iterable_dataset()
    read = [row["image"]["path"] for row in data.decode(False).shuffle(seed=42)]
    number = read.index(str(tmp_path / "2.png"))
    trainer = pictured(
        "qwen2_5_vl", tmp_path, eval_dataset=data, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8,
        **FEW,
    )  # fmt: skip
    words = rf"Row {number} of eval_dataset\.shuffle\(seed=42\), .* cannot be read: .*2\.png.* eval_on_start=True"
    with pytest.raises(ValueError, match=words):
        trainer.train()


def test_a_row_of_an_evaluation_whose_prompt_is_text_or_comes_from_its_environment_is_given_as_it_is():
    for column in ({"prompt": ["w1"]}, {"environment": ["maze"]}):
        data = Dataset.from_dict(column)
        assert EvaluatedRows(data)[0] == data[0]


def test_a_row_of_an_evaluation_that_the_processor_refuses_is_no_row_that_is_left_out(tmp_path):
    row, words = LEFT_OUT["the image token in a text"]
    data = Dataset.from_list([row], features=Features({"prompt": MESSAGES, "image": Image()}))
    trainer = pictured(
        "qwen2_5_vl", tmp_path, eval_dataset=data, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
        **FEW,
    )  # fmt: skip
    with pytest.raises(ValueError, match=rf"A row of the evaluation dataset: {re.escape(words)}.* not left out"):
        trainer.train()


def test_the_number_of_a_row_with_more_images_than_places_is_said_at_construction(tmp_path):
    prompts = questions(8)
    prompts[5] = [{"role": "system", "content": "w1"}]
    data = Dataset.from_dict(
        {"prompt": prompts, "images": [[picture(i)] for i in range(8)]},
        features=Features({"prompt": MESSAGES, "images": [Image()]}),
    )
    with pytest.raises(ValueError, match="Row 5 of train_dataset: The row has 1 images, but its messages have places"):
        pictured("qwen2_5_vl", tmp_path, train_dataset=data)


def without_placeholder():
    processor = FAMILIES["qwen2_5_vl"].processor()
    processor.chat_template = "{% for m in messages %}{{ m['role'] }} w1 {% endfor %}"
    return processor


def changed(setting, value):
    processor = FAMILIES["qwen2_5_vl"].processor()
    setattr(processor.image_processor, setting, value)
    return processor


def large_pictures():
    columns = {"prompt": questions(8), "image": [picture(i, 400, 400) for i in range(8)]}
    return Dataset.from_dict(columns, features=Features({"prompt": MESSAGES, "image": Image()}))


REFUSED = {
    "a template without images": (
        {"processing_class": without_placeholder},
        "The processor refuses a prompt and its images: The total number of <|image_pad|> tokens",
    ),
    "a model of text": (
        {"model": lambda: AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=32, num_hidden_layers=1))},
        "processing_class is a Qwen25Processor, which shows images, but the model's configuration, a LlamaConfig, has "
        "no image token: pass processing_class.tokenizer",
    ),
    "no processor": (
        {"processing_class": lambda: None},
        "processing_class was left out, but the model, a Qwen2_5_VLForConditionalGeneration, has no name",
    ),
    "the processor of another family": (
        {"processing_class": FAMILIES["idefics3"].processor},
        "processing_class is a Idefics3Processor and the model a Qwen2_5_VLForConditionalGeneration, which do not go "
        "together: the processor makes pixel_attention_mask of images",
    ),
    "the processor of a larger sister": (
        {"processing_class": lambda: changed("patch_size", 8)},
        "the processor has image_processor.patch_size=8, and the model vision_config.patch_size=4. Pass the model's",
    ),
    "crops": (
        {"processing_class": lambda: changed("do_pan_and_scan", True)},
        "processing_class.image_processor.do_pan_and_scan=True cannot hold",
    ),
    "images with too many tokens": (
        {"processing_class": lambda: changed("size", {"shortest_edge": 64, "longest_edge": 400 * 400}),
         "train_dataset": lambda: large_pictures()},
        "A prompt of 2506 tokens leaves no room for a completion in the model's context of 256 tokens: 2500 of the "
        "tokens show its images (400 x 400 pixels). Show fewer or smaller images, or set a smaller processing_class."
        "image_processor.size (now {'shortest_edge': 64, 'longest_edge': 160000}), where the number of tokens depends "
        "on it. Or remove the row {'prompt': [{'role': 'user', 'content': 'w0 w1'}], 'image': <image of 400x400 ",
    ),
    "texts": (
        {"train_dataset": lambda: Dataset.from_dict(
            {"prompt": ["w1"] * 8, "image": [picture(i) for i in range(8)]},
            features=Features({"prompt": Value("string"), "image": Image()}))},
        "The dataset has images, but the prompt is text, in which they have no place",
    ),
    "a tokenizer": (
        {"processing_class": tiny_tokenizer},
        "train_dataset has a column 'image', but processing_class is a TokenizersBackend, which cannot show images",
    ),
    "a video": (
        {"train_dataset": lambda: with_one_picture().add_column("video", ["a.mp4"] * 8)},
        "train_dataset has a column 'video', but only text and images are supported",
    ),
    "one image in place of a list": (
        {"train_dataset": lambda: with_one_picture().rename_column("image", "images")},
        "The column 'images' of a row holds a PngImageFile: give a list of images, or name the column 'image'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_refused_at_construction(tmp_path, which):
    settings, words = REFUSED[which]
    with pytest.raises(ValueError, match=re.escape(words)):
        pictured("qwen2_5_vl", tmp_path, **{name: make() for name, make in settings.items()})


def test_the_name_of_a_model_of_text_is_refused_with_a_processor(model_path, tmp_path):
    with pytest.raises(ValueError, match="but the model's configuration, a LlamaConfig, has no image token"):
        pictured("qwen2_5_vl", tmp_path, model=model_path)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava_next"])
def test_the_delivery_check_is_made_on_text(tmp_path, family):
    engine = StubEngine(COMPLETE)
    trainer = pictured(family, tmp_path, engine=engine, delivery_check_steps=1, **FEW)
    scored, score = [], engine.score
    engine.score = lambda prompt_ids, *rest: scored.append(prompt_ids) or score(prompt_ids, *rest)
    trainer.train()
    assert scored and not any(trainer.model.config.image_token_id in ids for ids in scored)


@pytest.mark.parametrize(
    ("family", "path", "value", "words"),
    [
        (
            "qwen3_vl",
            "image_processor.merge_size",
            1,
            "merge_size=1, and the model vision_config.spatial_merge_size=2",
        ),
        (
            "qwen2_5_vl",
            "image_processor.temporal_patch_size",
            2,
            "temporal_patch_size=2, and the model vision_config.",
        ),
        (
            "gemma3",
            "image_processor.size",
            {"height": 32, "width": 32},
            "size.height=32, and the model vision_config.",
        ),
        ("gemma3", "image_seq_length", 9, "image_seq_length=9, and the model mm_tokens_per_image=4"),
        ("idefics3", "image_processor.max_image_size", {"longest_edge": 32}, "makes 16 features of a tile of 32 x 32"),
        ("smolvlm", "image_seq_len", 9, "image_seq_len=9, and the model makes 4 features of a tile of 16 x 16"),
        ("llava_next", "image_processor.crop_size", {"height": 32, "width": 32}, "crop_size.height=32, and the model"),
        ("llava_next", "patch_size", 8, "has patch_size=8, and the model vision_config.patch_size=4"),
    ],
)
def test_the_processor_of_a_model_of_another_size_is_refused(tmp_path, family, path, value, words):
    processor = owner = FAMILIES[family].processor()
    *owners, name = path.split(".")
    for step in owners:
        owner = getattr(owner, step)
    setattr(owner, name, value)
    with pytest.raises(ValueError, match=f"do not go together: the processor .*{re.escape(words)}"):
        pictured(family, tmp_path, processing_class=processor)


COUNTS = [2, 0, 1, 0, 0, 3, 1, 0]
QUICK_OR_LONG = [
    name if name in ("qwen2_5_vl", "idefics3") else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES
]


@pytest.mark.parametrize("family", QUICK_OR_LONG)
def test_images_stay_with_their_rows_and_rows_without_any_are_trained(tmp_path, family):
    """The engine has sampled every row alone, so a row with the images of another one would leave a gap."""
    trainer = pictured(
        family, tmp_path, TakeRecorder, train_dataset=with_pictures(COUNTS), shuffle_dataset=False, max_steps=8,
        per_device_train_batch_size=2, steps_per_generation=8, gradient_accumulation_steps=4, beta=0.05,
        learning_rate=1e-3, log_completions=True,
    )  # fmt: skip
    trainer.train()
    numbers = [0 if images is None else len(images.images) for images in taken_images(trainer)]
    assert sorted(numbers) == sorted(COUNTS * 2)
    gaps = logged(trainer, "a3po/engine_gap/max")
    assert len(gaps) == 4 and max(gaps) < 1e-4
    assert logged(trainer, "kl")[0] == pytest.approx(0, abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_stays_and_the_language_model_learns(tmp_path, family):
    model = FAMILIES[family].model()
    tower = {n: p.detach().clone() for n, p in model.named_parameters() if "visual" in n or "vision_" in n}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in tower)
    trainer = pictured(family, tmp_path, TakeRecorder, max_steps=3, model=model)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert tower and all((after[name] == value).all() for name, value in tower.items())
    assert any((after[name] != value).any() for name, value in before.items())


@pytest.mark.long
def test_image_tokens_are_not_sampled(tmp_path):
    adapter = LoraConfig(r=4, target_modules="all-linear")
    trainer = pictured("gemma3", tmp_path, TakeRecorder, engine="transformers", peft_config=adapter, temperature=5.0)
    trainer.train()
    sampled = {token for _, group in trainer.groups for rollout in group.rollouts for token in rollout.token_ids}
    assert trainer.model.config.image_token_id not in sampled and len(sampled) > 10
    assert max(logged(trainer, "a3po/engine_gap/max")) < 1e-3


@pytest.mark.long
def test_reward_functions_in_processes_receive_images(tmp_path):
    trainer = pictured("qwen2_5_vl", tmp_path, TakeRecorder, reward_funcs=brightness, reward_workers=1, **FEW)
    trainer.train()
    [(_, group)] = trainer.groups
    assert group.score.rewards == [[float(sum(group.prompt.images.images[0].getpixel((0, 0))))]] * 4


def brightness(completions, image, **kwargs):
    return [float(sum(one.getpixel((0, 0)))) for one in image]


def test_a_group_function_receives_images(tmp_path):
    seen = []
    trainer = pictured("qwen2_5_vl", tmp_path, on_group=seen.append, **FEW)
    trainer.train()
    assert [len(group.prompt.images.images) for group in seen] == [1]
    assert seen[0].prompt.example["image"].size == seen[0].prompt.images.images[0].size


@pytest.mark.parametrize("streamed", [False, True])
def test_an_evaluation_shows_images(tmp_path, streamed):
    data = with_one_picture(4)
    trainer = pictured(
        "qwen2_5_vl", tmp_path, eval_dataset=data.to_iterable_dataset() if streamed else data, eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8, reward_funcs=reward, **FEW,
    )  # fmt: skip
    trainer.train()
    shown = [request.images for request in trainer.args.engine.requests]
    assert len(shown) == 5 and None not in shown
    assert len(logged(trainer, "eval_reward")) == 1


def test_an_image_without_pixels_is_refused():
    with pytest.raises(UnreadableImage, match=r"0 × 4 pixels large, so it shows nothing"):
        opened_image(PILImage.new("RGB", (0, 4)))
