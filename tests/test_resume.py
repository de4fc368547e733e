"""Resuming: a run goes on exactly where its checkpoint was saved, and only from a checkpoint that is whole."""

import errno
import json
import logging
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.runs import TakeRecorder
from tests.tiny import VOCAB, tiny_prompts
from trl_a3po import A3POConfig
from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.choose_checkpoint import newest_valid
from trl_a3po.errors import CheckpointError
from trl_a3po.report.timeline import NAME, read_timeline
from trl_a3po.testing import StubEngine, scripted_completion

pytestmark = pytest.mark.long

GENERATIONS, LENGTH = 4, 6
COMPLETE = scripted_completion(VOCAB, LENGTH)
# True of a process, not of a run.
TIMED = ("time", "per_second", "a3po/queue", "a3po/engine/", "a3po/delivery/", "train_loss", "flos")


def reward(completion_ids, log_extra, log_metric, **kwargs):
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("longest", max(len(ids) for ids in completion_ids))
    return [sum(ids) % 11 / 10 for ids in completion_ids]


@pytest.fixture
def build(model_path, tmp_path):
    def build(run="run", *, trainer_class=TakeRecorder, config_class=A3POConfig, **settings):
        options = {name: settings.pop(name) for name in ("peft_config", "eval_dataset") if name in settings}
        dataset = settings.pop("train_dataset", None) or tiny_prompts(16)
        if config_class is A3POConfig:
            settings = {"schedule": "sync", "engine": StubEngine(COMPLETE), **settings}
        settings = {
            "per_device_train_batch_size": 4,
            "num_generations": GENERATIONS,
            "gradient_accumulation_steps": 2,
            "max_completion_length": LENGTH,
            "max_steps": 10,
            "learning_rate": 3e-3,
            "save_strategy": "steps",
            "save_steps": 1,
            "logging_steps": 1,
            **settings,
        }
        args = config_class(
            output_dir=str(tmp_path / run),
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
            **settings,
        )
        torch.manual_seed(3)  # the adapter's initialisation
        return trainer_class(model_path, reward, args=args, train_dataset=dataset, **options)

    return build


def saved(trainer, step) -> Path:
    return Path(trainer.args.output_dir) / f"checkpoint-{step}"


def state_of(trainer, step):
    return checkpoint.read_json(saved(trainer, step) / checkpoint.STATE)


def history(trainer):
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in TIMED)}
        for entry in trainer.state.log_history
    ]


def indices(takes):
    return [group.prompt.index for _, groups in takes for group in groups]


def assert_same_run(found, expected):
    for (name, a), (_, b) in zip(found.model.named_parameters(), expected.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    ours, theirs = ([json.dumps(entry, sort_keys=True) for entry in history(run)] for run in (found, expected))
    assert ours == theirs  # as text: every digit, and NaN equals NaN


# --- exactly where it was saved -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"num_iterations": 2}, marks=pytest.mark.long),
        pytest.param({"steps_per_generation": 4}, marks=pytest.mark.long),
        {"steps_per_generation": 3},  # batches begin inside an optimizer step
        pytest.param({"steps_per_generation": 1}, marks=pytest.mark.long),
        pytest.param({"weight_sync_steps": 2, "num_iterations": 2}, marks=pytest.mark.long),
        {"num_iterations": 2, "beta": 0.04, "proximal_method": "recompute"},
    ],
    ids=str,
)
def test_a_resumed_sync_run_is_the_uninterrupted_one_to_the_last_bit(build, settings):
    whole = build(**settings)
    whole.train()
    for step in (4, 5, 8):  # 8 is the end of an epoch
        resumed = build(f"resumed {step}", **settings)
        resumed.train(resume_from_checkpoint=str(saved(whole, step)))
        assert_same_run(resumed, whole)
        assert indices(resumed.takes) == indices(take for take in whole.takes if take[0] >= step)


def test_an_adapter_resumes_to_the_last_bit(build):
    settings = {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "num_iterations": 2}
    whole = build(**settings)
    whole.train()
    resumed = build("resumed", **settings)
    resumed.train(resume_from_checkpoint=str(saved(whole, 5)))
    assert_same_run(resumed, whole)


def test_a_batch_half_used_keeps_its_completions_table(build):
    whole = build(log_completions=True, num_iterations=2, max_steps=4)
    whole.train()
    resumed = build("resumed", log_completions=True, num_iterations=2, max_steps=4)
    resumed.train(resume_from_checkpoint=str(saved(whole, 1)))
    assert list(resumed._logs["completion"]) == list(whole._logs["completion"])
    name = "completions/completions_00002.parquet"
    tables = [pd.read_parquet(Path(trainer.args.output_dir) / name).to_dict("list") for trainer in (whole, resumed)]
    assert len(tables[0]["completion"]) == 2 * GENERATIONS
    assert repr(tables[1]) == repr(tables[0])


def test_epochs_that_end_inside_an_accumulation_window_keep_their_takes(build):
    settings = {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "train_dataset": tiny_prompts(8)}
    settings |= {"max_steps": 7}  # 8 micro-steps an epoch: optimizer steps of 3, 3 and 2
    whole = build(**settings)
    whole.train()
    for step in (3, 4, 5):
        resumed = build(f"resumed {step}", **settings)
        resumed.train(resume_from_checkpoint=str(saved(whole, step)))
        assert_same_run(resumed, whole)


def test_a_streamed_dataset_resumes_at_its_row_in_any_epoch(build):
    settings = {"num_iterations": 2, "max_steps": 8}  # two epochs of four rows
    whole = build(train_dataset=tiny_prompts(4).to_iterable_dataset(), **settings)
    whole.train()
    resumed = build("resumed", train_dataset=tiny_prompts(4).to_iterable_dataset(), **settings)
    resumed.train(resume_from_checkpoint=str(saved(whole, 3)))
    assert_same_run(resumed, whole)
    # In a later epoch the Trainer restores the noise that shuffles a batch's rows elsewhere; the prompts are the same.
    resumed = build("resumed", train_dataset=tiny_prompts(4).to_iterable_dataset(), **settings)
    resumed.train(resume_from_checkpoint=str(saved(whole, 6)))
    assert [g.prompt.example for _, groups in resumed.takes for g in groups] == [
        g.prompt.example for version, groups in whole.takes for g in groups if version >= 6
    ]


def test_skipping_no_data_keeps_the_prompts_and_is_refused_where_it_would_move_them(build):
    whole = build(max_steps=6)
    whole.train()
    resumed = build("resumed", max_steps=6, ignore_data_skip=True)
    resumed.train(resume_from_checkpoint=str(saved(whole, 3)))
    assert indices(resumed.takes) == indices(whole.takes)[6:]
    ragged = {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "max_steps": 4}
    build("ragged", train_dataset=tiny_prompts(8), **ragged).train()
    skipping = build("ragged", train_dataset=tiny_prompts(8), ignore_data_skip=True, **ragged)
    with pytest.raises(ValueError, match="ignore_data_skip=True moves the end of the epoch"):
        skipping.train(resume_from_checkpoint=True)


# --- along the lineage --------------------------------------------------------------------------------------------


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class SlowEngine(StubEngine):
    """Hands back groups some calls later, out of order, so that a checkpoint finds them in flight."""

    def wait(self, timeout):
        held = getattr(self, "held", []) + super().wait(timeout)
        out, self.held = [e for i, e in enumerate(held) if i % 3 == 1], [e for i, e in enumerate(held) if i % 3 != 1]
        if not out and self.held:
            out = [self.held.pop()]
        return out


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}, {"steps_per_generation": 4}], ids=str)
def test_an_async_run_trains_every_prompt_once_along_its_lineage(build, settings):
    settings = {**settings, "schedule": "async", "max_staleness": 4, "max_steps": 12}
    lineage, step = [], 0
    for stop in (3, 4, 9, 12):
        trainer = build(engine=SlowEngine(COMPLETE), **settings)
        trainer.add_callback(StopAt(stop))
        trainer.train(resume_from_checkpoint=step > 0)
        assert trainer.state.global_step == stop
        lineage, step = lineage + trainer.takes, stop
    assert sorted(indices(lineage)) == list(range(len(indices(lineage))))
    rows = sum(len(groups) for _, groups in lineage)
    assert rows == 12 * 2 * 4 // (settings.get("num_iterations", 1) * GENERATIONS)
    for version, groups in lineage:
        stamps = [v for group in groups for rollout in group.rollouts for v in rollout.versions]
        assert version - max(stamps) >= 0 and version - min(stamps) <= 4
    outcomes = json.loads((saved(trainer, 12) / checkpoint.STATE).read_text())["queue"]["outcomes"]
    assert outcomes["prompts"] == outcomes["prompt_outcomes"]["trained"] == rows
    assert outcomes["attempts"] == sum(outcomes["attempt_outcomes"].values()) >= rows


def test_a_run_resumed_at_its_end_trains_nothing_more(build):
    build().train()
    again = build()
    before = json.loads((saved(again, 10) / "trainer_state.json").read_text())
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == before["global_step"] == 10
    assert again.takes == []


def test_a_run_can_be_made_longer(build):
    build(max_steps=4).train()
    longer = build(max_steps=6)
    longer.train(resume_from_checkpoint=True)
    assert indices(longer.takes) == [8, 9, 10, 11]


@pytest.mark.parametrize("cut", ["", '{"kind": "lo'])
def test_a_run_that_was_killed_behind_its_last_step_has_ended_once_it_is_resumed(build, cut):
    trainer = build(max_steps=2)
    trainer.train()
    timeline = Path(trainer.args.output_dir) / NAME
    *lines, last = timeline.read_text().splitlines()
    assert json.loads(last)["kind"] == "end"
    timeline.write_text("\n".join(lines) + "\n" + cut)  # as a kill leaves it

    for _ in range(2):
        build(max_steps=2).train(resume_from_checkpoint=True)
        ends = [line for line in read_timeline(trainer.args.output_dir) if line["kind"] == "end"]
        assert [end["error"] for end in ends] == [None]


# --- only from a checkpoint that is whole -------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["no marker", "truncated weights", "missing groups"])
def test_a_checkpoint_that_is_not_whole_is_not_used(build, caplog, damage):
    whole = build(max_steps=4)
    whole.train()
    folder = saved(whole, 4)
    match damage:
        case "no marker":
            (folder / checkpoint.MARKER).unlink()
        case "truncated weights":
            weights = folder / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1])
        case "missing groups":
            (folder / checkpoint.GROUPS).unlink()
    with pytest.raises(ValueError, match=r"checkpoint-4' (has|lacks)"):
        build(max_steps=4).train(resume_from_checkpoint=str(folder))
    resumed = build(max_steps=4)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    assert "Not resuming from a checkpoint that is not valid" in caplog.text and "checkpoint-4" in caplog.text
    assert [version for version, _ in resumed.takes] == [3]
    assert checkpoint.why_invalid(folder) is None  # written again


def test_a_new_run_in_the_folder_of_an_older_one_is_the_one_that_is_resumed(build, caplog):
    build(max_steps=4, save_steps=2).train()
    assert "of an earlier run" not in caplog.text
    newer = build(max_steps=8, save_steps=2)
    newer.add_callback(StopAt(3))
    newer.train()
    warnings = [record.getMessage() for record in caplog.records if "of an earlier run" in record.getMessage()]
    assert len(warnings) == 1 and "holds checkpoint-2, checkpoint-4 of" in warnings[0]
    resumed = build(max_steps=8, save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert [version for version, _ in resumed.takes] == [2, 3, 4, 5, 6, 7]
    assert re.search(
        r"Not resuming from \S+checkpoint-4, which was written before checkpoint-2, by another", caplog.text
    )
    runs = {step: checkpoint.run_of(saved(resumed, step)) for step in (2, 4, 6, 8)}
    assert runs == dict.fromkeys((2, 4, 6, 8), resumed_run(resumed))


def resumed_run(trainer) -> str:
    start, *_ = reversed(read_timeline(trainer.args.output_dir, "start"))
    assert start["resumed"] and len(start["run"]) == 32
    return start["run"]


def test_a_checkpoint_from_before_runs_had_names_is_resumed_under_none(build):
    whole = build(max_steps=4)
    whole.train()
    for step in range(1, 5):
        path = saved(whole, step) / checkpoint.MARKER
        marker = checkpoint.read_json(path)
        path.write_text(json.dumps({name: marker[name] for name in ("format", "policy_version", "files")}))
    resumed = build(max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert [version for version, _ in resumed.takes] == [4, 5]
    assert checkpoint.run_of(saved(resumed, 6)) is None
    assert newest_valid(Path(resumed.args.output_dir)) == saved(resumed, 6)


def test_without_any_valid_checkpoint_resuming_says_what_is_wrong_with_each(build):
    whole = build(max_steps=2)
    whole.train()
    for step in (1, 2):
        (saved(whole, step) / checkpoint.MARKER).unlink()
    with pytest.raises(ValueError, match=r"checkpoint-2 has no .*checkpoint-1 has no"):
        build(max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("moment", ["before the marker", "while the weights are written"])
def test_dying_while_saving_keeps_the_last_valid_checkpoint_at_a_limit_of_one(build, monkeypatch, moment):
    trainer = build(save_total_limit=1, save_steps=2, max_steps=6)

    class Killed(BaseException):
        pass

    def die(*args, **kwargs):
        if trainer.state.global_step == 4:
            raise Killed

    if moment == "before the marker":
        real = checkpoint.complete
        monkeypatch.setattr(checkpoint, "complete", lambda *args: die() or real(*args))
    else:
        real_save = trainer.save_model
        monkeypatch.setattr(trainer, "save_model", lambda *args, **kwargs: die() or real_save(*args, **kwargs))
    with pytest.raises(Killed):
        trainer.train()
    monkeypatch.undo()
    assert newest_valid(Path(trainer.args.output_dir)) == saved(trainer, 2)
    resumed = build(save_total_limit=1, save_steps=2, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert [version for version, _ in resumed.takes] == [2, 3, 4, 5]
    assert checkpoint.checkpoints(Path(trainer.args.output_dir)) == [saved(trainer, 6)]


@pytest.mark.parametrize(
    "name", [checkpoint.GROUPS, checkpoint.STATE, checkpoint.MARKER, "optimizer.pt", "training_args.bin"]
)
def test_a_full_disk_ends_the_run_with_the_path_and_older_checkpoints_stay_valid(build, monkeypatch, name):
    trainer = build(save_steps=2, save_total_limit=1)
    real_write, real_save = checkpoint._write, torch.save

    def full(path):
        if Path(path).name == name and trainer.state.global_step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write", lambda path, data: full(path) or real_write(path, data))
    monkeypatch.setattr(torch, "save", lambda value, path, *a, **k: full(path) or real_save(value, path, *a, **k))
    with pytest.raises(CheckpointError, match=r"checkpoint-4 could not be written.*No space left"):
        trainer.train()
    assert newest_valid(Path(trainer.args.output_dir)) == saved(trainer, 2)
    assert trainer.args.engine.closed


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_while_the_trainer_writes_its_state_names_the_checkpoint(build, monkeypatch):
    trainer = build(save_steps=2)
    monkeypatch.setattr(type(trainer.state), "save_to_json", full_disk)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 could not be written.*No space left"):
        trainer.train()


def test_a_full_disk_at_the_final_save_names_the_folder(build, monkeypatch, tmp_path):
    trainer = build(save_strategy="no")
    trainer.train()
    monkeypatch.setattr(type(trainer.model), "save_pretrained", full_disk)
    with pytest.raises(CheckpointError, match=r"Saving the model failed in .*final .*No space left"):
        trainer.save_model(str(tmp_path / "final"))


def test_older_checkpoints_that_cannot_be_deleted_are_named(build, monkeypatch):
    trainer = build(save_steps=2, save_total_limit=1)
    monkeypatch.setattr("shutil.rmtree", full_disk)
    with pytest.raises(CheckpointError, match="Deleting older checkpoints failed in"):
        trainer.train()
    assert newest_valid(Path(trainer.args.output_dir)) == saved(trainer, 4)


# --- what the Trainer does with checkpoints -----------------------------------------------------------------------


def test_the_best_model_is_loaded_at_the_end_and_its_checkpoint_kept(build):
    trainer = build(
        eval_dataset=tiny_prompts(4),
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        save_total_limit=2,
        per_device_eval_batch_size=4,
        max_steps=8,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",  # completions are scripted: the first evaluation stays the best
        greater_is_better=True,
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best == saved(trainer, 2)
    weights, last = load_file(best / "model.safetensors"), load_file(saved(trainer, 8) / "model.safetensors")
    loaded = trainer.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    assert any(not torch.equal(last[name], tensor) for name, tensor in weights.items())
    assert checkpoint.checkpoints(Path(trainer.args.output_dir)) == [best, saved(trainer, 8)]
    assert checkpoint.why_invalid(best) is None and checkpoint.why_invalid(saved(trainer, 8)) is None


def test_the_saved_arguments_keep_their_save_total_limit(build):
    trainer = build(save_total_limit=1, max_steps=2)
    trainer.train()
    arguments = torch.load(saved(trainer, 2) / "training_args.bin", weights_only=False)
    assert arguments.save_total_limit == trainer.args.save_total_limit == 1


# --- other runs ---------------------------------------------------------------------------------------------------


def test_other_settings_are_refused_by_name(build):
    whole = build(max_steps=2)
    whole.train()
    with pytest.raises(ValueError, match=r"seed=42 \(now 7\), gradient_accumulation_steps=2 \(now 4\)"):
        build(max_steps=2, seed=7, gradient_accumulation_steps=4, steps_per_generation=2).train(
            resume_from_checkpoint=True
        )


def test_other_prompts_are_refused(build):
    whole = build(schedule="async", max_steps=4)
    whole.train()
    reversed_rows = tiny_prompts(16).select(range(15, -1, -1))
    with pytest.raises(ValueError, match="Prompt 2 of the prompt stream is not the one it was"):
        build(schedule="async", max_steps=4, train_dataset=reversed_rows).train(
            resume_from_checkpoint=str(saved(whole, 1))
        )


def test_another_number_of_rows_is_refused(build):
    build(schedule="async", max_steps=2).train()
    with pytest.raises(ValueError, match=r"rows of train_dataset=16 \(now 24\)"):
        build(schedule="async", max_steps=4, train_dataset=tiny_prompts(24)).train(resume_from_checkpoint=True)


def test_rows_that_are_not_outstanding_may_be_others(build):
    whole = build(schedule="async", max_steps=8, max_staleness=1)
    whole.train()
    other = tiny_prompts(16).to_list()
    outstanding = {item["prompt_index"] for item in state_of(whole, 2)["queue"]["outstanding"]}
    untouched = {group.prompt.example["target"] for _, group in whole.groups if group.prompt.index > max(outstanding)}
    for row in untouched:
        other[row]["prompt"] = "w7 w7 w7"
    resumed = build("resumed", schedule="async", max_steps=8, max_staleness=1, train_dataset=Dataset.from_list(other))
    resumed.train(resume_from_checkpoint=str(saved(whole, 2)))
    assert {g.prompt.example["target"] for _, g in resumed.groups if g.prompt.example["prompt"] == "w7 w7 w7"} == (
        untouched
    )
    assert sorted(indices(whole.takes)[:4] + indices(resumed.takes)) == list(range(16))


def test_a_run_goes_on_with_a_larger_max_staleness(build):
    whole = build(schedule="async", max_steps=4, max_staleness=2)
    whole.train()
    resumed = build("resumed", schedule="async", max_steps=10, max_staleness=6)
    resumed.train(resume_from_checkpoint=str(saved(whole, 2)))
    assert sorted(indices(whole.takes)[:4] + indices(resumed.takes)) == list(range(20))
    for version, group in resumed.groups:
        assert all(version - stamp <= 6 for rollout in group.rollouts for stamp in rollout.versions)


@pytest.mark.long
def test_a_run_goes_on_with_another_engine(build):
    """Groups that were ready keep the log-probs they were sampled with; the other engine samples the rest."""
    whole = build(schedule="async", max_steps=4, max_staleness=2)
    whole.train()
    resumed = build("resumed", schedule="async", max_steps=6, max_staleness=2, engine="transformers", engine_threads=1)
    resumed.train(resume_from_checkpoint=str(saved(whole, 2)))
    assert sorted(indices(whole.takes)[:4] + indices(resumed.takes)) == list(range(12))
    kept = {item["prompt_index"] for item in state_of(whole, 2)["queue"]["outstanding"] if item["score"]}
    first = {group.prompt.index: group for _, group in whole.groups}
    for _, group in resumed.groups:
        if group.prompt.index in kept:
            assert [r.logps for r in group.rollouts] == [r.logps for r in first[group.prompt.index].rollouts]


@pytest.mark.parametrize(
    "named, after",
    [
        ("temperature", {"temperature": 0.5}),
        ("min_new_tokens", {"generation_kwargs": {"min_new_tokens": 2}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"date_string": "today"}}),
    ],
    ids=str,
)
def test_groups_of_other_sampling_are_sampled_again(build, caplog, named, after):
    """At learning_rate=0 the policy never moves, so a log-prob of another temperature would show in the ratio."""
    whole = build(schedule="async", max_steps=4, learning_rate=0.0, max_staleness=2)
    whole.train()
    common = {"schedule": "async", "max_steps": 4, "learning_rate": 0.0, "max_staleness": 2, "log_all_metrics": True}
    resumed = build("resumed", **common, **after)
    resumed.train(resume_from_checkpoint=str(saved(whole, 1)))
    assert re.search(rf"saved with .*{named}=.* sampled again", caplog.text)
    assert all(group.submitted_version >= 1 for _, group in resumed.groups)
    ratios = [entry[f"a3po/rho/{end}"] for entry in resumed.state.log_history[1:-1] for end in ("min", "max")]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-4) and ratios
    assert sorted(indices(whole.takes)[:2] + indices(resumed.takes)) == list(range(8))


def test_a_shorter_max_completion_length_holds_for_all_that_is_trained_after_a_resume(build):
    whole = build(schedule="async", max_steps=4, max_staleness=2)
    whole.train()
    shorter = StubEngine(scripted_completion(VOCAB, 2))
    resumed = build("resumed", schedule="async", max_steps=4, max_staleness=2, max_completion_length=2, engine=shorter)
    resumed.train(resume_from_checkpoint=str(saved(whole, 1)))
    assert max(len(rollout.token_ids) for _, group in resumed.groups for rollout in group.rollouts) <= 2


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.5},
        {"beta": 0.04},
        {"proximal_method": "recompute"},
        {"scale_rewards": "none"},
        {"reward_weights": [5.0]},
        {"mask_truncated_completions": True},
    ],
    ids=str,
)
def test_inside_a_batch_what_made_the_batch_cannot_change(build, changed):
    whole = build(max_steps=1, steps_per_generation=4)
    whole.train()
    name = next(iter(changed))
    with pytest.raises(ValueError, match=rf"saved inside a generation batch, which was made with {name}=.*\(now"):
        build("resumed", max_steps=4, steps_per_generation=4, **changed).train(
            resume_from_checkpoint=str(saved(whole, 1))
        )


def test_between_two_batches_what_makes_a_batch_may_change(build):
    whole = build(max_steps=2)
    whole.train()
    resumed = build("resumed", max_steps=3, beta=0.04, scale_rewards="none", proximal_method="recompute")
    resumed.train(resume_from_checkpoint=str(saved(whole, 2)))
    assert resumed.state.global_step == 3 and "kl" in resumed.state.log_history[-2]


def test_another_tokenizer_is_refused(build):
    whole = build(schedule="async", max_steps=2)
    whole.train()
    resumed = build("resumed", schedule="async", max_steps=4)
    resumed.processing_class.add_tokens(["another"])
    with pytest.raises(ValueError, match=r"saved with another vocabulary of the tokenizer, in which"):
        resumed.train(resume_from_checkpoint=str(saved(whole, 1)))


def test_groups_are_scored_again_when_the_reward_functions_are_others(build):
    whole = build(schedule="async", max_steps=6, max_staleness=6)
    whole.train()
    folder = saved(whole, 1)
    groups = checkpoint.read_json(folder / checkpoint.STATE)["queue"]["outstanding"]
    scored = [item["prompt_index"] for item in groups if item["score"] is not None]
    resumed = build("resumed", schedule="async", max_steps=6, max_staleness=6)
    resumed.reward_func_names, seen = ["other"], []
    resumed.reward_funcs[0] = lambda completion_ids, target, **kwargs: (
        seen.append(target[0]) or [1.0] * len(completion_ids)
    )
    resumed.train(resume_from_checkpoint=str(folder))
    assert len(seen) == 10 and len(scored) > 0


def test_a_checkpoint_of_grpo_trainer_goes_on_at_the_right_row(build):
    grpo = build("grpo", trainer_class=GRPOTrainer, config_class=GRPOConfig, max_steps=3, num_iterations=2)
    grpo.train()
    whole = build(max_steps=6, num_iterations=2)
    whole.train()
    resumed = build("resumed", max_steps=6, num_iterations=2)
    resumed.train(resume_from_checkpoint=str(saved(grpo, 2)))
    assert indices(resumed.takes) == indices(whole.takes)[2:]
    with pytest.raises(ValueError, match="step 3 lies inside a generation batch"):
        build("resumed", max_steps=6, num_iterations=2).train(resume_from_checkpoint=str(saved(grpo, 3)))


@pytest.mark.parametrize("before, after", [("sync", "periodic"), ("periodic", "sync"), ("periodic", "periodic")])
def test_a_run_goes_on_between_two_periods(build, before, after):
    settings = {"max_steps": 4, "optim": "sgd", "learning_rate": 0.1}
    whole = build(schedule=before, **settings)
    whole.train()
    resumed = build("resumed", schedule=after, **settings)
    resumed.train(resume_from_checkpoint=str(saved(whole, 2)))
    first = [take for take in whole.takes if take[0] < 2]
    assert sorted(indices(first) + indices(resumed.takes)) == sorted(indices(whole.takes)) == list(range(8))
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_checkpoint_copied_elsewhere_is_still_valid(build, tmp_path):
    whole = build(max_steps=3)
    whole.train()
    shutil.copytree(saved(whole, 2), tmp_path / "elsewhere")
    resumed = build("resumed", max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    assert_same_run(resumed, whole)


@pytest.mark.parametrize("before, after", [("async", "fixed_lag"), ("fixed_lag", "async")])
def test_a_run_goes_on_with_the_other_schedule(build, before, after):
    """Every prompt is trained once, within the bound; a fixed lag holds for all that is sampled after its ramp."""
    first = build(schedule=before, max_staleness=2, max_steps=4)
    first.train()
    second = build("second", schedule=after, max_staleness=2)
    second.train(resume_from_checkpoint=str(saved(first, 4)))
    assert sorted(indices(first.takes) + indices(second.takes)) == list(range(20))
    assert [version for version, _ in second.takes] == [4, 5, 6, 7, 8, 9]
    staleness = {
        version: {version - stamp for group in groups for rollout in group.rollouts for stamp in rollout.versions}
        for version, groups in second.takes
    }
    assert all(max(ds) <= 2 for ds in staleness.values())
    if after == "fixed_lag":
        assert all(staleness[version] == {2} for version in (6, 7, 8, 9))
