"""What the plan and the files of a run say of images, and what weights that are partitioned cannot train."""

import json
from pathlib import Path

import pytest

from tests.images.pictured import pictured, with_pictures
from tests.runs import TakeRecorder
from trl_a3po.checks.images import check_mixed_images, check_prepared_images
from trl_a3po.session.image_memory import ROWS

pytestmark = pytest.mark.long


def test_the_plan_and_the_log_of_rollouts_count_images(tmp_path):
    trainer = pictured(
        "qwen2_5_vl", tmp_path, TakeRecorder, train_dataset=with_pictures([2, 0, 1, 1]), kept_rollouts=100,
        shuffle_dataset=False, max_staleness=2, max_steps=2,
    )  # fmt: skip
    trainer.train()
    images = [group.prompt.images for _, group in trainer.groups]
    mean = sum(0 if one is None else one.nbytes for one in images[:ROWS]) / ROWS
    line = next(line for line in trainer.plan().splitlines() if line.startswith("images:"))
    assert "for 6 prompts" in line and f"({mean / 2**20:.2f} MiB each, as in the first 4 rows)" in line
    text = (Path(trainer.args.output_dir) / "rollouts.jsonl").read_text()
    kept = [entry for entry in map(json.loads, text.splitlines()) if "tokens" in entry]
    assert {entry["prompt"]: entry.get("images") for entry in kept} == {0: 2, 1: None, 2: 1, 3: 1}
    assert "PIL" not in text


def test_rows_with_and_without_images_are_refused_where_weights_are_partitioned(tmp_path):
    trainer = pictured("qwen2_5_vl", tmp_path, TakeRecorder, train_dataset=with_pictures([1, 0, 1, 1]), max_steps=2)
    trainer.train()
    rows = [(group, 0) for _, group in trainer.groups]
    check_mixed_images(rows, partitioned=False)
    with pytest.raises(ValueError, match="1 of the 4 rows of a batch have no images, which DeepSpeed ZeRO-3 and FSDP"):
        check_mixed_images(rows, partitioned=True)
    check_mixed_images([row for row in rows if row[0].prompt.images is not None], partitioned=True)


def test_a_batch_that_lost_its_images_is_refused(tmp_path):
    class Losing(TakeRecorder):
        def _tokenize_prompts(self, prompts):
            prompt_ids, images, fields = super()._tokenize_prompts(prompts)
            return prompt_ids, images and [one and one[:-1] for one in images], fields

    trainer = pictured("qwen2_5_vl", tmp_path, Losing, train_dataset=with_pictures([2] * 4), max_steps=1)
    with pytest.raises((RuntimeError, ValueError), match="images"):
        trainer.train()
    with pytest.raises(RuntimeError, match="an override of _tokenize_prompts, _generate or _generate_and_score"):
        check_prepared_images({}, trainer_images(tmp_path))


def trainer_images(tmp_path):
    trainer = pictured("qwen2_5_vl", tmp_path, TakeRecorder, max_steps=1)
    trainer.train()
    return [group.prompt.images for _, group in trainer.groups]
