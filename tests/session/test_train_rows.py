"""When rows of `train_dataset` are read, and by whom."""

from types import SimpleNamespace

import pytest
from datasets import IterableDataset
from transformers import TrainerCallback

from tests.runs import ScriptedGRPOTrainer, TakeRecorder, build
from tests.tiny import tiny_prompts
from trl_a3po import A3POTrainer
from trl_a3po.session.prompt_rows import NumberedRow
from trl_a3po.session.train_rows import CountedStream, TrainRows, UntakenRow, train_rows


class Curriculum(TrainerCallback):
    """Raises the stage in one of the Trainer's events."""

    def __init__(self, event, stage):
        self.stage = stage
        setattr(self, event, self.raise_stage)

    def raise_stage(self, args, state, control, **kwargs):
        self.stage[0] += 1


def staged_rows(stage, kind):
    if kind == "transform":
        return tiny_prompts().with_transform(lambda rows: {**rows, "stage": [stage[0]] * len(rows["prompt"])})
    rows = tiny_prompts().to_list()
    return IterableDataset.from_generator(lambda: iter(rows)).map(lambda row: {**row, "stage": stage[0]})


def stages_seen(trainer_class, model, folder, event="on_step_end", kind="transform", **settings):
    """The stage of each row of each generation batch."""
    stage, seen = [0], []

    class Seen(trainer_class):
        def _generate_and_score_completions(self, inputs):
            seen.append([row["stage"] for row in inputs])
            return super()._generate_and_score_completions(inputs)

    settings = {"max_steps": 6, "train_dataset": staged_rows(stage, kind), "remove_unused_columns": False, **settings}
    build(model, folder, Seen, callbacks=[Curriculum(event, stage)], **settings).train()
    return seen


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 1, "num_iterations": 2},
        {"steps_per_generation": 4},
        {"event": "on_step_begin", "gradient_accumulation_steps": 1},
        {"kind": "stream", "shuffle_dataset": False, "gradient_accumulation_steps": 1},
        {"kind": "stream", "shuffle_dataset": False, "steps_per_generation": 4},
    ],
    ids=str,
)
def test_without_staleness_rows_are_read_when_grpo_reads_them(model_path, tmp_path, settings):
    expected = stages_seen(ScriptedGRPOTrainer, model_path, tmp_path, **settings)
    assert expected[-1][0] > expected[0][0]
    assert stages_seen(A3POTrainer, model_path, tmp_path, **settings) == expected


@pytest.mark.long
def test_reads_do_not_depend_on_the_delivery_check_the_epoch_or_workers_of_the_dataloader(model_path, tmp_path):
    settings = {"gradient_accumulation_steps": 1, "max_steps": 8}
    expected = stages_seen(ScriptedGRPOTrainer, model_path, tmp_path, **settings)
    others = {"delivery_check_steps": 1, "engine": "transformers", "dataloader_num_workers": 1}
    assert stages_seen(A3POTrainer, model_path, tmp_path, **settings, **others) == expected


def test_with_staleness_rows_are_read_when_their_request_is_admitted(model_path, tmp_path):
    settings = {"gradient_accumulation_steps": 1, "max_staleness": 2, "max_steps": 8}
    seen = stages_seen(A3POTrainer, model_path, tmp_path, **settings)
    assert [step - stages[0] for step, stages in enumerate(seen)] == [0, 1, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_stream_that_can_be_read_once_loses_no_row(model_path, tmp_path, staleness):
    rows = iter([{"prompt": row["prompt"], "target": row["target"]} for row in tiny_prompts(40)])
    stream = IterableDataset.from_generator(lambda: rows)
    settings = {"train_dataset": stream, "shuffle_dataset": False, "max_steps": 8, "max_staleness": staleness}
    trainer = build(model_path, tmp_path, TakeRecorder, **settings)
    trainer.train()
    trained = [group.prompt.example["target"] for _, group in trainer.groups]
    assert sorted(trained) == list(range(trained[0], trained[0] + 16))
    assert len(list(rows)) >= 40 - 16 - trained[0] - 2 * (1 + staleness)


def test_a_stream_that_ends_ends_the_run_as_in_grpo(model_path, tmp_path):
    def run(trainer_class):
        rows = iter([{"prompt": row["prompt"], "target": row["target"]} for row in tiny_prompts(13)])
        stream = IterableDataset.from_generator(lambda: rows)
        trainer = build(model_path, tmp_path, trainer_class, train_dataset=stream, shuffle_dataset=False, max_steps=50)
        trainer.train()
        return trainer.state.global_step, trainer.state.epoch

    assert run(A3POTrainer) == run(ScriptedGRPOTrainer)


def test_what_the_dataloader_gives_says_where_the_rows_are(model_path, tmp_path):
    class Reads(A3POTrainer):
        def _prepare_inputs(self, rows):
            assert rows[0]["prompt"]
            return super()._prepare_inputs(rows)

    with pytest.raises(KeyError, match=r"'prompt' was read from .*_generate_and_score_completions\(inputs\)"):
        build(model_path, tmp_path, Reads).train()


def counted(number_of_epochs, rows_each, **options):
    read = []

    def rows():
        for epoch in range(number_of_epochs):
            for number in range(rows_each):
                read.append((epoch, number))
                yield NumberedRow(None, {"row": (epoch, number)})
            yield None

    return read, TrainRows(rows(), **{"batch": 2, "micro_steps": 3, "counted": 0, "kept": True, **options})


def test_a_stream_is_read_once_for_both_readers_in_whole_batches_and_epochs():
    read, rows = counted(2, 4)
    loader = CountedStream(rows, repeats=6)
    epoch = iter(loader)
    assert [next(epoch) for _ in range(12)] == [UntakenRow()] * 12 and len(read) == 2
    assert [next(rows)["row"] for _ in range(3)] == [(0, 0), (0, 1), (0, 2)] and len(read) == 3
    assert len(list(epoch)) == 12 and len(read) == 4
    assert len(list(loader)) == 24
    assert [row["row"] for row in rows] == [(0, 3), (1, 0), (1, 1), (1, 2), (1, 3)] and len(read) == 8
    assert list(loader) == []


def test_batches_that_a_resumed_dataloader_skips_are_not_read():
    read, rows = counted(1, 4, counted=5)
    assert len(list(CountedStream(rows, repeats=1))) == 8  # two batches and a half before, two from here on
    assert len(read) == 4


def test_a_resumed_dataloader_reads_as_far_as_the_batch_that_it_has_come_to():
    """Two batches of two rows, for three micro-steps each, were trained before."""
    read, rows = counted(1, 20, counted=4)
    for micro_step, wanted in ((6, 2), (8, 2), (9, 4)):
        rows.reach(micro_step)
        assert len(read) == wanted


@pytest.mark.parametrize(
    ("stream", "ignores", "skipped"), [(False, False, 6), (False, True, 6), (True, False, 6), (True, True, 0)]
)
def test_a_resumed_dataloader_begins_where_the_trainer_has_it_begin(stream, ignores, skipped):
    """The Trainer skips the batches before, unless `ignore_data_skip` says otherwise; where the dataset has a length,
    how far the dataloader has come is known from the step."""
    numbers = {"groups_per_batch": 2, "micro_steps_per_generation": 3, "groups_per_take": 2}
    dataset = tiny_prompts(8)
    trainer = SimpleNamespace(
        args=SimpleNamespace(ignore_data_skip=ignores, **numbers),
        train_dataset=dataset.to_iterable_dataset() if stream else dataset,
        _team=SimpleNamespace(is_main=True),
    )
    resumed = SimpleNamespace(queue=SimpleNamespace(first_row=1, next_take=3))
    assert train_rows(trainer, resumed)._counted == -skipped
    assert train_rows(trainer, None)._counted == 0


def test_a_process_that_does_not_sample_keeps_no_row():
    read, rows = counted(1, 4, kept=False)
    rows.reach(9)
    assert read == []
    assert len(list(CountedStream(rows, repeats=1))) == 4
    assert not rows._kept
