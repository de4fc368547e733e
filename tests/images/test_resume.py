"""A run with images that is saved and resumed goes on as the one that was not."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image as Pictures
from safetensors.torch import load_file

from tests.images.pictured import pictured, questions, with_pictures
from tests.runs import TakeRecorder, train_recorded
from tests.vision import messages, picture
from trl_a3po.protocol.images import PromptImages
from trl_a3po.rollout.queue_state import prompt_digest
from trl_a3po.session.prompt_rows import prompt_with_tokens, tokenize_prompt

COUNTS = [2, 1, 0, 3, 1, 2, 1, 1]
SETTINGS = {
    "max_staleness": 2,
    "schedule": "periodic",
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "learning_rate": 0.05,
    "log_completions": True,
}


def run(tmp_path, family, *, resume=None, **settings):
    data = with_pictures(COUNTS)
    trainer = pictured(family, tmp_path, TakeRecorder, train_dataset=data, **(SETTINGS | settings))
    if resume is None:
        return trainer, train_recorded(trainer)
    trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / resume))
    return trainer, None


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2_5_vl", {"schedule": "fixed_lag", "max_staleness": 1}),
        pytest.param(
            "idefics3", {"schedule": "async", "num_iterations": 2, "max_staleness": 2}, marks=pytest.mark.long
        ),
        pytest.param("gemma3", {"schedule": "async", "num_iterations": 2, "max_staleness": 2}, marks=pytest.mark.long),
        pytest.param("llava_next", {"schedule": "fixed_lag", "max_staleness": 1}, marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_is_the_run(tmp_path, family, settings):
    """At step 1 a run with two iterations is inside a batch; a run with a lag has groups that wait."""
    whole, _ = run(tmp_path, family, **settings)
    expected = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    for step in (1, 2):
        resumed, _ = run(tmp_path, family, resume=f"checkpoint-{step}", **settings)
        for name, parameter in resumed.model.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6)
        shown = [group.prompt.images is not None for _, group in resumed.groups]
        assert shown == [group.prompt.images is not None for _, group in whole.groups][-len(shown) :]
    state = json.loads((Path(whole.args.output_dir) / "checkpoint-1" / "a3po_state.json").read_text())
    assert "images" not in json.dumps(state["queue"])  # of rows, only their places are saved


def test_another_image_in_the_row_of_a_saved_group_is_refused(tmp_path):
    settings = {"schedule": "fixed_lag", "max_staleness": 1, "max_steps": 2}
    whole, _ = run(tmp_path, "qwen2_5_vl", **settings)
    data = with_pictures(COUNTS).map(lambda row: {"images": [Pictures.new("RGB", one.size) for one in row["images"]]})
    trainer = pictured("qwen2_5_vl", tmp_path, TakeRecorder, train_dataset=data, **(SETTINGS | settings))
    with pytest.raises(ValueError, match="of the prompt stream is not the one it was when the checkpoint was saved"):
        trainer.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-1"))


def test_groups_whose_images_are_prepared_otherwise_are_sampled_again(tmp_path, caplog):
    settings = {"schedule": "fixed_lag", "max_staleness": 1, "max_steps": 2}
    whole, _ = run(tmp_path, "qwen2_5_vl", **settings)
    processor = whole.processing_class
    processor.image_processor.size = {"shortest_edge": 8 * 8, "longest_edge": 8 * 8}
    trainer = pictured(
        "qwen2_5_vl", tmp_path, TakeRecorder, train_dataset=with_pictures(COUNTS), processing_class=processor,
        **(SETTINGS | settings),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-1"))
    size = "{'longest_edge': 576, 'shortest_edge': 64} (now {'longest_edge': 64, 'shortest_edge': 64})"
    words = f"was saved with processing_class.image_processor.size={size}: its finished groups are sampled again"
    assert words in caplog.text
    before = [group.prompt.token_ids for _, group in whole.groups if group.prompt.images][-1]
    assert len([group.prompt.token_ids for _, group in trainer.groups if group.prompt.images][-1]) < len(before)


def test_images_that_make_other_tokens_than_those_of_a_saved_group_are_refused(tmp_path):
    trainer = pictured("qwen2_5_vl", tmp_path)
    row = trainer.train_dataset[0]
    tokens = tokenize_prompt(trainer, row).token_ids
    assert prompt_with_tokens(trainer, row, tokens).token_ids == tokens
    with pytest.raises(ValueError, match="resume with the dataset, the processor and the chat template of that run"):
        prompt_with_tokens(trainer, row, tokens[1:])


def test_the_digest_of_a_prompt_reads_the_pixels():
    text = questions(1)[0]
    rows = [
        {"prompt": text},
        {"prompt": text, "image": picture(1)},
        {"prompt": text, "image": picture(2)},
        {"prompt": text, "images": [picture(1), picture(2)]},
        {"prompt": text, "images": [picture(2), picture(1)]},
        {"prompt": messages("w1", picture(1))},
        {"prompt": messages("w1", picture(2))},
    ]
    digests = [prompt_digest(row) for row in rows]
    assert len(set(digests)) == len(rows)
    assert digests[5] == prompt_digest({"prompt": messages("w1", picture(1))})
    assert (
        digests[0] == prompt_digest({"prompt": text, "image": None}) == prompt_digest({"prompt": text, "images": []})
    )


def test_the_digest_of_a_prompt_reads_the_file_that_a_row_names():
    row = {"prompt": messages("w1"), "image": "a.png"}
    seen = [prompt_digest(row, PromptImages((picture(number),), {})) for number in (1, 1, 2)]
    assert seen[0] == seen[1] != seen[2]


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    """Qwen2.5-VL is saved under other names than the model has."""
    trainer = pictured(
        "qwen2_5_vl", tmp_path, eval_dataset=with_pictures([1, 1]), eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4, metric_for_best_model="eval_reward", greater_is_better=True, max_steps=3,
        load_best_model_at_end=True, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    saved = type(trainer.model).from_pretrained(best).state_dict()
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(weight, saved[name], rtol=0, atol=0)
    last = load_file(Path(trainer.args.output_dir) / "checkpoint-3" / "model.safetensors")
    assert not last.keys() <= saved.keys()
