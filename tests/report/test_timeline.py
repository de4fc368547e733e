"""The timeline of a run says what the queue, the engine and the trainer did, also when it was resumed or killed."""

import json
import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from transformers import TrainerCallback

from tests.runs import COMPLETE, TakeRecorder, build
from trl_a3po import Rejection
from trl_a3po.protocol.engine import GroupFailed
from trl_a3po.report import timeline as timeline_module
from trl_a3po.report.gantt import PHASES, draw_gantt, rows_of
from trl_a3po.report.history import by_staleness, read_history
from trl_a3po.report.plot_runs import runs_figure
from trl_a3po.report.run_process import is_gone, this_process
from trl_a3po.report.timeline import NAME, OLDER, Timeline, read_timeline
from trl_a3po.testing import StubEngine


class LosesSome(StubEngine):
    """Loses the first attempt at every fifth prompt."""

    def submit(self, requests):
        lost = [r for r in requests if r.noise_key % 5 == 0 and r.noise_key not in self.lost]
        self.lost |= {r.noise_key for r in lost}
        super().submit([r for r in requests if r not in lost])
        self._events += [GroupFailed(r.request_id, "lost") for r in lost]

    def __init__(self, complete):
        super().__init__(complete)
        self.lost: set[int] = set()


def reject_some(group):
    return Rejection("every seventh") if group.prompt.index % 7 == 3 else None


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.fixture(scope="module")
def trained(model_path, tmp_path_factory):
    trainer = build(
        model_path,
        tmp_path_factory.mktemp("timeline"),
        TakeRecorder,
        engine=LosesSome(COMPLETE),
        max_staleness=2,
        max_steps=8,
        on_group=reject_some,
        eval_dataset=None,
    )
    trainer.train()
    return trainer


def lines(trainer, *kinds):
    return read_timeline(trainer.args.output_dir, *kinds)


def versions(trainer, kind):
    return [line["version"] for line in lines(trainer, kind)]


# --- what is in it --------------------------------------------------------------------------------------------------


def test_groups_are_counted_as_the_queues_outcomes_are(trained):
    counted = Counter(line["outcome"] for line in lines(trained, "group"))
    assert counted == trained.outcomes.attempt_outcomes
    assert {"trained", "failed: lost", "rejected: every seventh"} <= counted.keys()


def test_taken_groups_are_those_of_the_takes_at_their_versions(trained):
    groups = Counter((line["taken_version"], line["prompt"]) for line in lines(trained, "group"))
    taken = Counter((version, group.prompt.index) for version, groups in trained.takes for group in groups)
    assert taken == Counter({key: count for key, count in groups.items() if key[0] is not None})
    assert versions(trained, "take") == [version for version, _ in trained.takes]


def test_steps_publishes_and_logs_are_those_of_the_trainer(trained):
    assert versions(trained, "step") == list(range(1, 9))
    assert versions(trained, "engine_start") + versions(trained, "publish") == trained.args.engine.published
    assert [line["logged"] for line in lines(trained, "log")] == trained.state.log_history


def test_what_lasts_ends_after_it_began_and_waits_lie_inside_their_step(trained):
    steps = {line["version"]: line for line in lines(trained, "step")}
    for line in lines(trained, "take", "publish"):
        step = steps[line["version"] + 1]
        assert step["began"] <= line["began"] <= line["ended"] <= step["ended"]


def test_a_take_says_what_queue_and_engine_held(trained):
    takes = lines(trained, "take")
    for take in takes:
        assert 0 <= take["sampling"] + take["scoring"] + take["ready"] <= take["capacity"]
    for total in ("blocked", "tokens", "busy"):
        assert takes[0][total] <= takes[-1][total]
    assert takes[-1]["tokens"] == trained.args.engine.stats().tokens > takes[0]["tokens"] > 0
    assert takes[-1]["blocked"] > 0.0


def test_the_start_says_what_a_reader_needs_to_know_of_the_settings(trained):
    (start,) = lines(trained, "start")
    settings = {"groups_per_batch": 2, "num_generations": 4, "max_staleness": 2, "max_steps": 8}
    assert {name: start[name] for name in settings} == settings
    assert start["engine_slots"] is None
    size = trained.model.num_parameters()
    assert start["policy"] == {"parameters": size, "trained": size, "dtype": "float32"}
    assert start["process"] == this_process() and not is_gone(start["process"])


def test_generation_overlaps_training(trained):
    """While a batch is trained, groups of later ones are already submitted."""
    groups = [line for line in lines(trained, "group") if line["taken_version"] is not None]
    for step in lines(trained, "step")[:-1]:
        later = [group for group in groups if group["taken_version"] >= step["version"]]
        assert any(group["submitted"] < step["ended"] for group in later)


def test_metrics_by_staleness_are_rows(trained):
    rows = by_staleness(trained.state.log_history)
    for entry in trained.state.log_history[:-1]:
        shares = {row["staleness"]: row["fraction"] for row in rows if row["step"] == entry["step"]}
        assert sum(shares.values()) == pytest.approx(1)
        mean = sum(staleness * share for staleness, share in shares.items())
        assert mean == pytest.approx(entry["a3po/staleness/mean"])
    assert {"w/mean", "r/max", "clip/high", "ess"} <= rows[0].keys()


# --- runs that went on, or did not ----------------------------------------------------------------------------------


def test_along_a_lineage_every_prompt_is_trained_once(model_path, tmp_path):
    settings = {"max_staleness": 4, "max_steps": 9, "save_strategy": "steps", "save_steps": 2}
    for stop in (3, 7, 9):  # one step after a checkpoint each: it is made again
        trainer = build(model_path, tmp_path, engine=StubEngine(COMPLETE), **settings)
        trainer.add_callback(StopAt(stop))
        trainer.train(resume_from_checkpoint=stop > 3)
    trained = [line["prompt"] for line in lines(trainer, "group") if line["outcome"] == "trained"]
    assert sorted(trained) == list(range(18))
    assert versions(trainer, "step") == list(range(1, 10))
    assert [line["resumed"] for line in lines(trainer, "start")] == [False, True, True]
    assert [entry["step"] for entry in read_history(trainer.args.output_dir) if "reward" in entry] == list(
        range(1, 10)
    )


def test_a_new_run_in_the_folder_is_read_alone_and_the_old_lines_stay(model_path, tmp_path):
    for steps in (2, 3):
        trainer = build(model_path, tmp_path, max_steps=steps)
        trainer.train()
    assert versions(trainer, "step") == [1, 2, 3]
    content = (tmp_path / "A3POTrainer" / NAME).read_text()
    assert content.count('"kind": "step"') == 5


def test_a_run_that_goes_on_after_another_began_in_its_folder_is_read_without_the_others_lines(model_path, tmp_path):
    for steps, strategy, resume in ((4, "steps", False), (3, "no", False), (6, "steps", True)):
        trainer = build(model_path, tmp_path, max_steps=steps, save_strategy=strategy, save_steps=2, max_staleness=2)
        trainer.train(resume_from_checkpoint=resume)
    first, third = lines(trainer, "start")
    assert first["run"] == third["run"] and (first["resumed"], third["resumed"]) == (False, True)
    assert versions(trainer, "step") == list(range(1, 7))
    trained = [line["prompt"] for line in lines(trainer, "group") if line["outcome"] == "trained"]
    assert sorted(trained) == list(range(12))


def test_each_line_of_a_lineage_is_that_of_the_checkpoint_its_run_went_on_from(tmp_path):
    for run, begins, ends in (("a", 0, 4), ("b", 0, 3), ("a", 2, 4), ("b", 2, 3), ("a", 4, 5)):
        timeline = Timeline(tmp_path / NAME, run=run, version=begins, resumed=begins > 0)
        for version in range(begins + 1, ends + 1):
            timeline.write("step", version=version)
            if version % 2 == 0:
                timeline.write("checkpoint", version=version)
        timeline.close()
        found = read_timeline(tmp_path)
        assert [line["version"] for line in found if line["kind"] == "step"] == list(range(1, ends + 1))
        assert {line["run"] for line in found if line["kind"] == "start"} == {run}


def test_a_file_of_full_size_is_continued_in_another_and_two_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_module, "MOST_BYTES", 1000)
    for begins in (0, 38):  # resumed from a checkpoint two steps before the end
        timeline = Timeline(tmp_path / NAME, run="a", version=begins, resumed=begins > 0)
        for version in range(begins + 1, begins + 41):
            timeline.write("step", version=version)
            timeline.write("checkpoint", version=version)
            timeline.flush()
    timeline.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, OLDER]
    assert all(path.stat().st_size < 1300 for path in tmp_path.iterdir())
    found = [line["version"] for line in read_timeline(tmp_path, "step")]
    assert found == list(range(found[0], 79)) and 5 < len(found) < 40


def test_a_run_is_resumed_in_a_file_that_continues_it_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_module, "MOST_BYTES", 1000)
    for begins, ends in ((0, 20), (18, 19)):
        timeline = Timeline(tmp_path / NAME, run="a", version=begins, resumed=begins > 0)
        for version in range(begins + 1, ends + 1):
            timeline.write("step", version=version)
            timeline.write("checkpoint", version=version)
            timeline.flush()
        timeline.close()
    found = [line["version"] for line in read_timeline(tmp_path, "step")]
    assert found == list(range(found[0], 20))
    (tmp_path / OLDER).unlink()
    found = [line["version"] for line in read_timeline(tmp_path, "step")]
    assert found == list(range(found[0], 20)) and found[0] < 18


def test_a_run_without_a_name_goes_on_as_one(tmp_path):
    for begins, ends in ((0, 3), (2, 4)):
        timeline = Timeline(tmp_path / NAME, version=begins, resumed=begins > 0)
        for version in range(begins + 1, ends + 1):
            timeline.write("step", version=version)
            timeline.write("checkpoint", version=version)
        timeline.close()
    assert [line["version"] for line in read_timeline(tmp_path, "step")] == [1, 2, 3, 4]


def test_a_line_that_a_kill_cut_is_left_out_wherever_it_is(tmp_path):
    path = tmp_path / NAME
    path.write_text('{"kind": "start", "version": 0, "resumed": false}\n{"kind": "step", "vers')
    assert [line["kind"] for line in read_timeline(path)] == ["start"]
    Timeline(path, version=0, resumed=True).close()
    assert [line["kind"] for line in read_timeline(tmp_path)] == ["start", "start", "end"]


def test_a_file_that_is_no_timeline_is_refused_by_its_line(tmp_path):
    path = tmp_path / NAME
    path.write_text('{"kind": "start", "version": 0, "resumed": false}\nnothing\n{"kind": "end"}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .*timeline\.jsonl is not JSON"):
        read_timeline(path)
    with pytest.raises(FileNotFoundError, match="holds no timeline"):
        read_timeline(tmp_path / "nowhere")


def test_a_timeline_that_cannot_be_written_is_warned_of_once_and_the_run_goes_on(model_path, tmp_path, caplog):
    trainer = build(model_path, tmp_path)
    folder = tmp_path / "A3POTrainer" / NAME
    folder.mkdir(parents=True)  # where the file should be
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 4
    assert sum("cannot be written any more" in record.message for record in caplog.records) == 1


def test_numbers_that_are_not_finite_are_null(tmp_path):
    timeline = Timeline(tmp_path / NAME, version=0, resumed=False)
    timeline.log({"reward": float("nan"), "loss": float("inf"), "step": 1})
    timeline.close()
    content = (tmp_path / NAME).read_text()
    assert all(json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in content.splitlines())
    assert read_history(tmp_path) == [{"reward": None, "loss": None, "step": 1}]


def test_metrics_may_have_any_name_and_shadow_nothing(model_path, tmp_path):
    names = ["kind", "self", "time", "began", "logged", "version"]

    def reward(completion_ids, log_metric, **kwargs):
        for number, name in enumerate(names):
            log_metric(name, float(number))
        return [1.0] * len(completion_ids)

    trainer = build(model_path, tmp_path, reward_funcs=reward, max_steps=2)
    trainer.train()
    assert [line["kind"] for line in lines(trainer)].count("log") == len(trainer.state.log_history)
    start, end = lines(trainer, "start", "end")
    assert all(start["time"] <= line["time"] <= end["time"] for line in lines(trainer, "log"))
    path = tmp_path / "A3POTrainer" / NAME
    assert read_history(path) == trainer.state.log_history
    assert {name: read_history(path)[0][name] for name in names} == dict(zip(names, map(float, range(6)), strict=True))


def test_what_is_no_json_costs_the_timeline_with_a_warning(tmp_path, caplog):
    timeline = Timeline(tmp_path / NAME, version=0, resumed=False)
    timeline.flush()
    timeline.log({("a", "tuple"): 1.0})
    timeline.close()
    assert "cannot be written any more" in caplog.text
    assert [line["kind"] for line in read_timeline(tmp_path)] == ["start"]


def test_logs_of_a_timeline_from_before_they_were_nested_are_read(tmp_path):
    path = tmp_path / NAME
    path.write_text(
        '{"kind": "start", "version": 0, "resumed": false}\n{"kind": "log", "time": 1.5, "reward": 0.5, "step": 1}\n'
    )
    assert read_history(path) == [{"reward": 0.5, "step": 1}]


# --- the picture ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda pair: (pair[0], sum(pair)))))
def test_bars_of_a_row_never_overlap_and_rows_are_as_few_as_can_be(spans):
    rows = rows_of(spans)
    for i, (began, ended) in enumerate(spans):
        for j in range(i):
            assert rows[i] != rows[j] or ended <= spans[j][0] or spans[j][1] <= began
    at_once = max((sum(began <= moment < ended for began, ended in spans) for moment, _ in spans), default=0)
    assert len(set(rows)) == at_once


def test_bars_of_a_group_are_its_times(trained):
    axes = Figure().add_subplot()
    assert draw_gantt(axes, lines(trained), takes=100) == 8
    start = lines(trained, "take")[0]["began"]
    sampling = {
        (bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_facecolor()[:3] == to_rgb(PHASES[0][-1])
    }
    expected = [line for line in lines(trained, "group") if line["submitted"] and line["finished"]]
    for line in expected:
        left, width = line["submitted"] - start, line["finished"] - line["submitted"]
        assert any(abs(left - x) < 1e-5 and abs(width - w) < 1e-5 for x, w in sampling)


def test_one_run_is_drawn_with_its_timeline(trained):
    runs = [("run", trained.state.log_history)]
    titles = [axes.get_title(loc="left") for axes in runs_figure(runs, lines(trained)).axes]
    assert titles == [*(axes.get_title(loc="left") for axes in runs_figure(runs).axes), "Timeline"]


def test_a_run_that_was_killed_before_its_first_take_is_drawn_without():
    runs = [("run", [{"step": 1, "reward": 0.5}])]
    titles = [axes.get_title(loc="left") for axes in runs_figure(runs, [{"kind": "start"}]).axes]
    assert "Timeline" not in titles
