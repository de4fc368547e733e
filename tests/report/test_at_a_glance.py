"""What a person sees of a log line, and who gets all of it."""

import json
import time

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import EarlyStoppingCallback

from tests.runs import COMPLETE, ScriptedGRPOTrainer, build, logged
from tests.test_docs import ROOT, metric_names, rows
from tests.tiny import tiny_prompts
from trl_a3po.report.at_a_glance import AT_A_GLANCE, ONCE_THEY_COUNT
from trl_a3po.report.history import read_history
from trl_a3po.testing import StubEngine


class Tracker(TrainerCallback):
    """As the callbacks of `report_to` are."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def train(model_path, folder, **settings):
    tracker = Tracker()
    settings = {"log_all_metrics": False, "max_staleness": 2, **settings}
    trainer = build(model_path, folder, callbacks=[tracker], **settings)
    trainer.train()
    return trainer, tracker


def ours(entry) -> set[str]:
    return {name for name in entry if name.startswith("a3po/")}


def test_a_default_line_has_trls_metrics_and_a_handful_of_ours(model_path, tmp_path, capsys):
    trainer, tracker = train(model_path, tmp_path)
    theirs = build(model_path, tmp_path, ScriptedGRPOTrainer)
    theirs.train()
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    for entry, expected in zip(entries, theirs.state.log_history, strict=False):
        assert entry.keys() - ours(entry) == expected.keys()
        assert ours(entry) <= {*AT_A_GLANCE} and len(ours(entry)) >= 6
    everything = [logs for logs in tracker.logs if "reward" in logs]
    assert len(entries) == len(everything) == 4
    assert min(len(ours(logs)) for logs in everything) > 30
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{") and "a3po/" in line]
    assert {name for line in printed for name in ours(eval(line))} <= {*AT_A_GLANCE}


def test_every_metric_is_on_the_console_on_request(model_path, tmp_path, capsys):
    trainer, tracker = train(model_path, tmp_path, log_all_metrics=True)
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [ours(entry) for entry in entries] == [ours(logs) for logs in tracker.logs if "reward" in logs]
    assert "a3po/rho/max" in capsys.readouterr().out


def test_the_files_of_a_run_give_every_metric(model_path, tmp_path):
    trainer, tracker = train(model_path, tmp_path, save_strategy="steps", save_steps=2)
    trainer.save_state()
    folder = tmp_path / "A3POTrainer"
    for run, entries in ((folder, 5), (folder / "checkpoint-2", 2), (folder / "trainer_state.json", 5)):
        history = read_history(run)
        assert len(history) == entries
        assert [ours(entry) for entry in history] == [ours(logs) for logs in tracker.logs[:entries]]
    saved = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert all(ours(entry) <= {*AT_A_GLANCE} for entry in saved)


def test_a_resumed_run_keeps_its_small_history(model_path, tmp_path):
    train(model_path, tmp_path, save_strategy="steps", save_steps=2)
    trainer = build(model_path, tmp_path, log_all_metrics=False, max_staleness=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "A3POTrainer" / "checkpoint-2"))
    assert len(logged(trainer, "reward")) == 4
    assert all(ours(entry) <= {*AT_A_GLANCE} for entry in trainer.state.log_history)


def test_counts_of_failures_appear_once_they_count(model_path, tmp_path):
    def no_variance(completion_ids, target, **kwargs):
        return [float(number) * (target[0] % 2) for number in range(len(completion_ids))]

    trainer, _ = train(model_path, tmp_path, reward_funcs=no_variance, drop_zero_variance_groups=True)
    rejected = logged(trainer, "a3po/outcomes/rejected")
    assert rejected and min(rejected) > 0
    assert not logged(trainer, "a3po/outcomes/failed")


def test_the_best_model_and_early_stopping_find_any_metric(model_path, tmp_path):
    def reward(completion_ids, log_metric, **kwargs):
        log_metric("a3po/judge/harmony", 0.25)
        return [float(len(ids)) for ids in completion_ids]

    trainer = build(
        model_path,
        tmp_path,
        log_all_metrics=False,
        reward_funcs=reward,
        eval_dataset=tiny_prompts(4),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_a3po/judge/harmony",
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
        per_device_eval_batch_size=4,
    )
    trainer.train()
    assert trainer.state.best_metric == 0.25
    assert trainer.state.global_step == 2  # the metric has not improved


class Removes(TrainerCallback):
    def __init__(self):
        self.trainer, self.added = None, Tracker()

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer.remove_callback(PrinterCallback)
            self.trainer.add_callback(self.added)


def test_callbacks_may_be_added_and_removed_while_they_are_called(model_path, tmp_path, capsys):
    removes = Removes()
    trainer = build(model_path, tmp_path, callbacks=[removes], log_all_metrics=False)
    removes.trainer = trainer
    trainer.train()
    assert not any(isinstance(callback, PrinterCallback) for callback in trainer.callback_handler.callbacks)
    assert len(removes.added.logs) == 5  # four steps and the summary
    assert "'loss'" not in capsys.readouterr().out


class SlowStart(StubEngine):
    def start(self, *args):
        time.sleep(2.0)
        super().start(*args)


def test_the_start_of_the_engine_is_no_part_of_the_first_step_or_of_the_bars_estimate(model_path, tmp_path):
    elapsed = []

    class Watched(ProgressCallback):
        def on_step_end(self, *args, **kwargs):
            super().on_step_end(*args, **kwargs)
            elapsed.append(self.training_bar.format_dict["elapsed"])

    trainer = build(model_path, tmp_path, engine=SlowStart(COMPLETE), callbacks=[Watched()])
    began = time.monotonic()
    trainer.train()
    took = time.monotonic() - began
    assert logged(trainer, "a3po/time/engine_start")[0] >= 2.0
    assert sum(logged(trainer, "step_time")) < took - 2.0
    assert 0 < elapsed[0] <= elapsed[-1] < took - 2.0


def test_the_page_on_metrics_says_which_are_at_a_glance():
    section = [cells for cells in rows(ROOT / "docs" / "metrics.md", "metric") if len(cells) == 3]
    assert metric_names(section) == [*AT_A_GLANCE, *ONCE_THEY_COUNT]
    assert all(why for *_, why in section[: len(AT_A_GLANCE) - 1])


def test_what_is_at_a_glance_is_logged(model_path, tmp_path):
    trainer, _ = train(model_path, tmp_path)
    assert [name for name in AT_A_GLANCE if not logged(trainer, name)] == []
