"""What counts of a dataset is what its rows hold; a row that does not fit does not end a run hours later."""

import pytest
from datasets import Dataset, IterableDataset

from tests.runs import TakeRecorder, build, logged
from tests.tiny import tiny_prompts
from trl_a3po.report.left_out import rows_left_out
from trl_a3po.report.timeline import read_timeline
from trl_a3po.report.watch_view import watch_view
from trl_a3po.session import prompt_rows
from trl_a3po.session.left_out_rows import WARNINGS

LONG = "w5 " * 128  # all of the model's context


def rows_with_a_long_one(number):
    rows = tiny_prompts().to_list()
    rows[number]["prompt"] = LONG
    return rows


def test_a_column_that_a_transform_makes_is_a_prompt(model_path, tmp_path):
    raw = tiny_prompts().rename_column("prompt", "question")
    lazy = raw.with_transform(lambda batch: {"prompt": batch["question"], "target": batch["target"]})
    trainer = build(model_path, tmp_path, train_dataset=lazy, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_column_that_a_transform_leaves_out_is_missed_at_construction(model_path, tmp_path):
    lazy = tiny_prompts().with_transform(lambda batch: {"question": batch["prompt"]})
    with pytest.raises(ValueError, match="train_dataset has the columns question, but no 'prompt'"):
        build(model_path, tmp_path, train_dataset=lazy)


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_a_row_that_does_not_fit_is_numbered_at_construction(model_path, tmp_path, name):
    data = Dataset.from_list(rows_with_a_long_one(17))
    with pytest.raises(ValueError, match=rf"Row 17 of {name}: A prompt of 128 tokens"):
        build(model_path, tmp_path, **{name: data})


def test_only_rows_that_may_be_too_long_are_tokenised_at_construction(model_path, tmp_path, monkeypatch):
    tokenised, tokenize = [], prompt_rows.tokenize_prompt
    monkeypatch.setattr(
        prompt_rows, "tokenize_prompt", lambda trainer, row: tokenised.append(row) or tokenize(trainer, row)
    )
    build(model_path, tmp_path)
    assert len(tokenised) == 1


@pytest.mark.parametrize("kind", ["stream", "transform"])
def test_a_row_that_is_made_when_it_is_read_and_does_not_fit_is_left_out(model_path, tmp_path, caplog, kind):
    rows = rows_with_a_long_one(5)
    stream = IterableDataset.from_generator(lambda: iter(rows))
    data = stream if kind == "stream" else Dataset.from_list(rows).with_transform(lambda batch: batch)
    settings = {"train_dataset": data, "shuffle_dataset": False, "save_strategy": "steps", "save_steps": 1}
    trainer = build(model_path, tmp_path, TakeRecorder, **settings)
    trainer.train()
    assert [group.prompt.index for _, group in trainer.groups] == [0, 1, 2, 3, 4, 6, 7, 8]
    row = "Row 5 that was read from the stream" if kind == "stream" else "Row 5 of train_dataset"
    assert f"{row} is left out. A prompt of 128 tokens" in caplog.text
    assert logged(trainer, "a3po/rows/left_out")[-1] == 1.0
    for step, expected in ((3, [7, 8]), (1, [2, 3, 4, 6, 7, 8])):  # after the row, and before it
        resumed = build(model_path, tmp_path, TakeRecorder, **settings)
        resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{step}")
        assert [group.prompt.index for _, group in resumed.groups] == expected
        assert logged(resumed, "a3po/rows/left_out")[-1] == 1.0
    lines = read_timeline(trainer.args.output_dir)
    assert rows_left_out(lines) == {"with an overlong prompt": 1}
    [facts] = {(line["row"], line["dataset_row"]) for line in lines if line["kind"] == "left_out"}
    assert facts == (5, None if kind == "stream" else 5)


def test_the_number_of_a_row_is_that_of_the_dataset_in_whatever_order_it_is_read(model_path, tmp_path, caplog):
    data = Dataset.from_list(rows_with_a_long_one(5)).with_transform(lambda batch: batch)
    trainer = build(model_path, tmp_path, train_dataset=data, max_steps=len(data) // 2)
    trainer.train()
    line = read_timeline(trainer.args.output_dir, "left_out")[0]
    assert line["dataset_row"] == 5 != line["row"]
    assert "Row 5 of train_dataset is left out." in caplog.text


def test_warnings_of_rows_that_are_left_out_are_bounded(model_path, tmp_path, caplog):
    rows = tiny_prompts().to_list()
    stream = IterableDataset.from_generator(lambda: iter([{**rows[0], "prompt": LONG}] * 20 + rows))
    trainer = build(model_path, tmp_path, train_dataset=stream, shuffle_dataset=False, max_steps=1)
    trainer.train()
    warnings = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert len(warnings) == WARNINGS
    assert warnings[-1].endswith("Further rows with an overlong prompt are counted without a warning.")
    assert len(read_timeline(trainer.args.output_dir, "left_out")) == 20


def test_a_run_that_ends_because_no_row_fits_counts_as_many_as_its_error_says(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_a3po.rollout.prompt_stream.LEFT_OUT_IN_A_ROW", 20)
    rows = tiny_prompts().to_list()
    stream = IterableDataset.from_generator(lambda: iter([*rows[:4], *[{**rows[0], "prompt": LONG}] * 50]))
    trainer = build(model_path, tmp_path, train_dataset=stream, shuffle_dataset=False)
    with pytest.raises(ValueError, match=r"20 rows in a row are left out \(20 with an overlong prompt\)"):
        trainer.train()
    lines = read_timeline(trainer.args.output_dir)
    assert rows_left_out(lines) == watch_view(lines).left_out == {"with an overlong prompt": 20}


@pytest.mark.parametrize("settings", [{}, {"max_completion_length": 200}], ids=["", "longer than the context"])
def test_a_completion_ends_by_length_where_the_context_ends(model_path, tmp_path, caplog, settings):
    long = "w5 " * 118 + "w{}"  # of 119 tokens, which leave 9 of the context of 128
    rows = Dataset.from_dict({"prompt": [long.format(number) for number in range(8)], "target": [0] * 8})
    trainer = build(
        model_path, tmp_path, train_dataset=rows, eval_dataset=rows.select([0]), per_device_eval_batch_size=4,
        eval_strategy="steps", eval_steps=2, max_steps=2, engine="transformers",
        **{"max_completion_length": 12, **settings},
    )  # fmt: skip
    assert "The prompts of 9 rows leave fewer than max_completion_length=" in caplog.text
    assert "at the least 9: completions of these rows end there, by length" in caplog.text
    trainer.train()
    assert logged(trainer, "completions/max_length") == [9.0, 9.0]
    assert logged(trainer, "eval_completions/max_length") == [9.0]
    assert max(logged(trainer, "a3po/engine_gap/max")) < 1e-3
