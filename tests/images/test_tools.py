"""Tools, environments and rollout functions that show pictures: what is sampled, prepared and trained is what
`GRPOTrainer`'s own loop makes of the same turns, where it can, and in every family what the processor makes of the
whole conversation."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from trl.data_utils import prepare_multimodal_messages

from tests.episodes.test_same_as_grpo import METRICS, KeepingTrainer, ToldGRPOTrainer
from tests.images.pictured import pictured, questions, with_pictures
from tests.images.talking import TOOLS, ids, look, note, picture_of, results_in, talk, talking_processor
from tests.runs import assert_same_gradients, build, train_recorded
from tests.vision import FAMILIES
from trl_a3po.episodes.image_rules import tool_content
from trl_a3po.episodes.templates import RefusedByProcessor
from trl_a3po.episodes.tools import ToolRollout
from trl_a3po.episodes.turn_requests import TurnRequests
from trl_a3po.protocol.engine import GroupRequest
from trl_a3po.protocol.images import PromptImages
from trl_a3po.rollout.batch_rows import images_of_row
from trl_a3po.testing import StubEngine

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:You are using 'environment_factory'"),
    pytest.mark.filterwarnings("ignore:The tokenizer has a legacy"),
]

LIKE_TRL = ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long)]
QUICK_OR_LONG = [
    name if name in ("qwen2_5_vl", "idefics3") else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES
]
COUNTS = [2, 1, 0, 3, 1, 2, 1, 1]
PREPARED = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"),
    *("pixel_values", "image_grid_thw", "mm_token_type_ids", "num_images"),
)


def reward(prompts, completions, completion_ids, **kwargs):
    """Of the tokens, and of how many pictures the messages show."""
    shown = [
        sum(
            isinstance(part.get("image"), Image.Image) for message in [*prompt, *completion] for part in parts(message)
        )
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return [sum(tokens) % 7 + float(number) for tokens, number in zip(completion_ids, shown, strict=True)]


def parts(message) -> list:
    return message["content"] if isinstance(message.get("content"), list) else []


class TalkingGRPOTrainer(ToldGRPOTrainer):
    """Gives TRL tensors, as image processors of torchvision do: it divides the arrays of prompts by their methods."""

    def _tokenize_prompts(self, prompts):
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        return prompt_ids, images, {name: tensor(field) for name, field in fields.items()}


def tensor(field):
    ragged = isinstance(field, list) and isinstance(field[0], list)
    return field if ragged else torch.as_tensor(np.asarray(field))


class PlayingTrainer(KeepingTrainer):
    """Keeps the rows that it takes."""

    def _take(self):
        rows = super()._take()
        self.rows = [*getattr(self, "rows", []), *self._current_batch.rows]
        return rows


def talking(family, folder, trainer_class=PlayingTrainer, complete=talk, resume=None, **settings):
    """A trainer that has trained on rollouts with tools, from the beginning or the checkpoint `resume`."""
    own = {"engine": StubEngine(complete)} if issubclass(trainer_class, KeepingTrainer) else {}
    defaults = {
        "reward_funcs": reward,
        "processing_class": talking_processor(family),
        "train_dataset": Dataset.from_dict({"prompt": questions()}),
        "tools": None if "rollout_func" in settings else list(TOOLS),
        "max_steps": 2,
        "max_completion_length": 120,
        "shuffle_dataset": False,
    }
    model = FAMILIES[family].model()
    if settings.get("beta"):  # TRL loads the reference model from where the policy was loaded
        model.save_pretrained(folder / "model")
        model = str(folder / "model")
    trainer = build(model, folder, trainer_class, **(own | defaults | settings))
    trainer.complete = complete
    if resume is None:
        trainer.gradients = train_recorded(trainer)
    else:
        trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / resume))
    return trainer


class Gallery:
    """Begins with a picture of the row, and shows more."""

    def reset(self, **row):
        return [{"type": "text", "text": "w9"}, {"type": "image", "image": picture_of(int(row["number"]))}]

    def look(self, number: int) -> list:
        """Shows a picture.

        Args:
            number: of the picture

        Returns:
            the picture
        """
        return look(number)

    def get_reward(self):
        return 1.0


class TextGallery(Gallery):
    def reset(self, **row):
        return f" w{row['number']}"


def numbered(data=None):
    data = data or Dataset.from_dict({"prompt": questions()})
    return data.add_column("number", list(range(len(data))))


CASES = {
    "text alone": {"tools": [note]},
    "text alone, pictures in prompts": {"tools": [note], "train_dataset": with_pictures([2, 1, 1, 3, 1, 2, 1, 1])},
    "pictures of tools": {},
    "pictures of tools and in prompts": {"train_dataset": with_pictures(COUNTS)},
    "results that do not fit": {"max_completion_length": 20},
    "an environment that shows pictures": {
        "tools": None, "environment_factory": Gallery, "train_dataset": numbered(),
    },
    "an environment, and pictures in prompts": {
        "tools": None, "environment_factory": TextGallery, "train_dataset": numbered(with_pictures(COUNTS)),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", LIKE_TRL)
def test_tools_train_as_in_grpo(tmp_path, family, case):
    theirs, mine = (talking(family, tmp_path, kind, **CASES[case]) for kind in (TalkingGRPOTrainer, PlayingTrainer))
    for expected, got in zip(theirs.batches, mine.batches, strict=True):
        for key in PREPARED:
            torch.testing.assert_close(got.get(key), expected.get(key), msg=lambda text, key=key: f"{key}: {text}")
        assert got["num_items_in_batch"] == expected["num_items_in_batch"]
    assert_same_gradients(mine.gradients, theirs.gradients)
    for expected, got in zip(theirs.state.log_history, mine.state.log_history, strict=True):
        same = {key: value for key, value in expected.items() if key.startswith(METRICS)}
        assert {key: got[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-6, nan_ok=True)


def whole_conversation(trainer, row):
    """The tokens and fields that the processor makes of a rollout's prompt and messages at once."""
    group, number = row
    episode = group.rollouts[number].episode
    before = [*episode.prompt, *episode.messages[:-1]]  # the last answer
    said = [{name: value for name, value in message.items() if name != "tool_calls"} for message in before]
    return trainer.processing_class.apply_chat_template(
        [prepare_multimodal_messages(said)],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"return_tensors": "pt"},
    )


@pytest.mark.parametrize("family", QUICK_OR_LONG)
def test_the_images_of_a_rollout_are_those_of_its_whole_conversation(tmp_path, family):
    trainer = talking(family, tmp_path, train_dataset=with_pictures(COUNTS), max_steps=1)
    shown = set()
    for row in trainer.rows:
        images, made = images_of_row(row), whole_conversation(trainer, row)
        rollout = row[0].rollouts[row[1]]
        whole = [*rollout.episode.prompt_ids, *rollout.token_ids]
        length = made["input_ids"].shape[1]
        assert whole[:length] == made["input_ids"][0].tolist()
        shown.add(0 if images is None else len(images.images))
        if images is None:
            assert "pixel_values" not in made
            continue
        for name, field in images.over(length, torch.device("cpu")).items():
            torch.testing.assert_close(field, made[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert len(shown) > 3


@pytest.mark.parametrize("family", QUICK_OR_LONG)
def test_the_trainers_log_probs_are_those_of_each_rollout_alone(tmp_path, family):
    """The stub samples each turn alone, by a forward of its own; a row with other images would leave a gap."""
    trainer = talking(family, tmp_path, train_dataset=with_pictures(COUNTS), max_steps=1)
    assert trainer.state.log_history[0]["a3po/engine_gap/max"] < 1e-4
    assert trainer.batches[0]["num_images"] is not None and sum(trainer.batches[0]["tool_mask"].flatten() == 0) > 20


@pytest.mark.parametrize("family", QUICK_OR_LONG)
def test_a_resumed_run_goes_on_with_the_pictures_of_its_queued_rollouts(tmp_path, family):
    settings = {
        "train_dataset": with_pictures(COUNTS), "max_staleness": 1, "schedule": "fixed_lag", "save_strategy": "steps",
        "save_steps": 1, "max_steps": 3, "learning_rate": 0.05,
    }  # fmt: skip
    whole = talking(family, tmp_path, **settings)
    asked = len(whole.args.engine.requests)
    resumed = talking(family, tmp_path, resume="checkpoint-1", **settings)
    assert len(resumed.args.engine.requests) < asked  # the queued groups are not sampled again
    for name, parameter in resumed.model.named_parameters():
        torch.testing.assert_close(parameter, whole.model.get_parameter(name), rtol=0, atol=1e-6)
    for mine, theirs in zip(resumed.rows, whole.rows[-len(resumed.rows) :], strict=True):
        one, two = images_of_row(mine), images_of_row(theirs)
        assert (one is None) == (two is None)
        if one is not None:
            assert described(one.images) == described(two.images) and one.fields.keys() == two.fields.keys()
            for name, field in one.fields.items():
                length = min(field.shape[-1], two.fields[name].shape[-1]) if name.endswith("token_type_ids") else None
                torch.testing.assert_close(field[..., :length], two.fields[name][..., :length], rtol=0, atol=0)
    completions = [described(row[0].rollouts[row[1]].episode.messages) for row in (*resumed.rows, *whole.rows)]
    assert completions[: len(resumed.rows)] == completions[-len(resumed.rows) :]


def described(value):
    """`value` with the pixels in place of each picture."""
    if isinstance(value, Image.Image):
        return np.asarray(value).tolist()
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return [described(item) for item in value] if isinstance(value, list | tuple) else value


def shot(number: int):
    """Returns what cannot be shown, or can in another form.

    Args:
        number: of what

    Returns:
        something
    """
    return [
        picture_of(1),
        [{"type": "image", "image": "no/such/file.png"}],
        [{"type": "image", "url": "https://example.org/a.png"}],
        [{"type": "video", "video": "a.mp4"}],
        [picture_of(1), "w1"],
        Image.new("RGB", (3000, 4)),  # refused by Qwen's processor: too narrow
        ["w1", "w2"],
        "w1 <|image_pad|> w2",
        Image.new("CMYK", (20, 16)),
    ][number]


RESULTS = {
    0: ([{"type": "image", "image": picture_of(1)}], 1),
    1: ("An image cannot be read from 'no/such/file.png'", 0),
    2: ("a part of type 'image' holds no image", 0),
    3: ("the result has a part of type 'video'", 0),
    4: ("the result is a list of images and other things", 0),
    5: ("the processor refuses the messages or their images: absolute aspect ratio", 0),
    6: ("['w1', 'w2']", 0),
    7: ("w1 < |image_pad|> w2", 0),
    8: ([{"type": "image", "image": Image.new("CMYK", (20, 16))}], 1),
}


def test_results_of_tools_that_are_no_content_parts(tmp_path):
    shot.__name__ = "path"
    found = {}
    for numbers in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 8, 8, 8]):

        def ask(prompt_ids, number, numbers=numbers):
            return ids("w1 <eos>" if results_in(prompt_ids) else f"call path w{numbers[number]} <eos>")

        trainer = talking("qwen2_5_vl", tmp_path, complete=ask, tools=[shot], max_steps=1)
        for row in trainer.rows:
            episode = row[0].rollouts[row[1]].episode
            images = images_of_row(row)
            found[numbers[row[1]]] = (
                episode.messages[1]["content"],
                0 if images is None else len(images.images),
                episode.tool_failures,
            )
    for number, (content, shown) in RESULTS.items():
        text, images, failures = found[number]
        assert images == shown, number
        assert failures == (number in (1, 2, 3, 4, 5)), number
        if isinstance(content, str):
            assert content in text
        else:
            assert described(text) == described(content)


def test_an_image_for_a_policy_that_reads_text_alone_is_a_failure():
    assert tool_content([{"type": "text", "text": "a"}], None) == [{"type": "text", "text": "a"}]
    assert tool_content([1, 2], None) == [1, 2]
    assert tool_content((1, 2), None) == "(1, 2)"
    part = {"type": "image", "image": picture_of(1)}
    for result in (picture_of(1), [part], part, (part, part)):
        with pytest.raises(ValueError, match="the result is an image, and the policy reads text alone"):
            tool_content(result, None)


def test_images_that_the_processor_refuses_are_failures_of_their_own_tools_alone():
    class Templates:
        image_rules = None

        def is_longer(self, texts, most):
            return False

        def suffix(self, messages):
            if any("broken" in str(message["content"]) and "error" not in message["content"] for message in messages):
                raise RefusedByProcessor("no")
            return [1], None

    runner, added = object.__new__(ToolRollout), []
    runner._templates = Templates()
    episode = SimpleNamespace(
        tokens_left=9, tool_failures=0, append_tokens=lambda ids, messages, images: added.append(messages)
    )
    contents = ([{"type": "image", "image": name}] for name in ("good", "broken", "fine"))
    runner._append(episode, [{"role": "tool", "content": content} for content in contents])
    first, second, third = (message["content"] for message in added[0])
    assert first[0]["image"] == "good" and third[0]["image"] == "fine"
    assert second == "{'error': 'no'}" and episode.tool_failures == 1


class Canvas(Gallery):
    def reset(self, **row):
        self.canvas = Image.new("RGB", (20, 16))

    def look(self, number: int):
        """Draws.

        Args:
            number: the colour

        Returns:
            the picture
        """
        self.canvas.paste((number, number, number), (0, 0, 20, 16))
        return self.canvas


def test_an_image_that_is_drawn_in_later_stays_as_it_was(tmp_path):
    def complete(prompt_ids, number):
        turn = results_in(prompt_ids)
        return ids(f"call look w{10 * turn + number + 1} <eos>" if turn < 2 else "w1 <eos>")

    trainer = talking(
        "qwen2_5_vl", tmp_path, complete=complete, tools=None, environment_factory=Canvas, train_dataset=numbered(),
        max_steps=1,
    )  # fmt: skip
    for row in trainer.rows:
        colours = [image.getpixel((0, 0))[0] for image in images_of_row(row).images]
        assert colours == [row[1] + 1, row[1] + 11]


async def shown_by_a_function(episode):
    messages = list(episode.prompt)
    for turn in range(2):
        answer = await episode.sample(messages)
        part = {"type": "image", "image": picture_of(turn + episode.number)}
        messages += [answer.message, {"role": "user", "content": [{"type": "text", "text": "w3"}, part]}]
    await episode.sample(messages)
    return float(episode.number)


@pytest.mark.parametrize("family", QUICK_OR_LONG)
def test_a_rollout_function_shows_pictures(tmp_path, family):
    def complete(prompt_ids, number):
        return ids(f"w{number + 1} <eos>")

    trainer = talking(
        family, tmp_path, complete=complete, rollout_func=shown_by_a_function, train_dataset=with_pictures(COUNTS),
        max_steps=1, beta=0.1,
    )  # fmt: skip
    assert trainer.state.log_history[0]["a3po/engine_gap/max"] < 1e-4
    for row in trainer.rows:
        images, made = images_of_row(row), whole_conversation(trainer, row)
        length = made["input_ids"].shape[1]
        rollout = row[0].rollouts[row[1]]
        assert [*rollout.episode.prompt_ids, *rollout.token_ids][:length] == made["input_ids"][0].tolist()
        for name, field in images.over(length, torch.device("cpu")).items():
            torch.testing.assert_close(field, made[name], rtol=0, atol=0)


@pytest.mark.parametrize("shared", [True, False])
def test_turns_with_other_pictures_of_the_same_size_are_not_sampled_together(shared):
    submitted, images = [], PromptImages((), {})

    async def ask_for_two():
        turns = TurnRequests(submitted.extend, lambda request_id: None)
        each = [images, images] if shared else [PromptImages((), {}), PromptImages((), {})]
        requests = [GroupRequest(0, 0, (1, 2), 1, number, images=one) for number, one in enumerate(each)]
        tasks = [asyncio.ensure_future(turns.ask(request)) for request in requests]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()

    asyncio.run(ask_for_two())
    assert [request.num_rollouts for request in submitted] == ([2] if shared else [1, 1])


def test_an_evaluation_and_the_table_of_completions_show_the_pictures_of_tools(tmp_path):
    trainer = talking(
        "qwen2_5_vl", tmp_path, train_dataset=with_pictures(COUNTS), eval_dataset=with_pictures([1, 0]), max_steps=1,
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, log_completions=True, log_multimodal=True,
    )  # fmt: skip
    (evaluated,) = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert evaluated["eval_tools/call_frequency"] == pytest.approx(9 / 4)
    shown = [len(images or ()) for images in trainer._logs["images"]]
    assert len(shown) == 8 and max(shown) > 2


@pytest.mark.parametrize("family", ["gemma3", "idefics3"])
def test_a_model_is_given_no_argument_that_it_does_not_take(tmp_path, family):
    """TRL marks the images of tools by `token_type_ids` in every family without a grid; only Gemma 3 reads them."""
    trainer, given = pictured(family, tmp_path), []

    def padded(model, ids, mask, length, **arguments):
        given.append(arguments)
        return torch.zeros(len(ids), length), None, None

    ids, images = torch.ones(1, 3, dtype=torch.long), {"pixel_values": torch.ones(1, 1, 3, 4, 4)}
    if family == "idefics3":
        images["pixel_attention_mask"] = torch.ones(1, 1, 4, 4)
    trainer._training_forward(padded, trainer.model, ids, ids, 1, **images, num_images=[1], token_type_ids=ids)
    assert ("token_type_ids" in given[0]) == (family == "gemma3") and "pixel_values" in given[0]
