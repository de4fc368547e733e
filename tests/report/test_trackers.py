"""What trackers get: metrics under names that make sections, and rollouts as trackio's traces."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from tests.runs import build
from tests.tiny import tiny_tokenizer
from trl_a3po import Group
from trl_a3po.protocol.records import EpisodeRecord, Prompt, Rollout, Score
from trl_a3po.report.tracker_names import tracker_name
from trl_a3po.report.trackio_traces import EVERY, MOST, TrackioTraces


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("train/a3po/queue/ready", "queue/ready"),
        ("train/a3po/d2/w/mean", "d2/w/mean"),
        ("train/a3po/ess", "a3po/ess"),
        ("train/reward", "train/reward"),
        ("eval/a3po/queue/ready", "eval/a3po/queue/ready"),
        ("queue/ready", "queue/ready"),
    ],
)
def test_a_metric_is_in_the_section_of_its_part(name, shown):
    assert tracker_name(name) == shown


class Tracker(TrainerCallback):
    """Names what it gets as the trackers of transformers do."""

    def __init__(self):
        self.logged: list[dict] = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logged.append(integration_utils.rewrite_logs(logs))


@pytest.fixture
def trackio(monkeypatch):
    """A stand-in for the package, which keeps the steps and the traces that it gets."""
    module = ModuleType("trackio")
    module.Trace = SimpleNamespace
    module.logs = []
    module.log = lambda logs, step: module.logs.append((step, logs["rollouts"]))
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_a_run_gives_trackers_sections_and_trackio_its_traces(model_path, tmp_path, trackio, monkeypatch):
    monkeypatch.setattr("trl.extras.profiling.is_trackio_available", lambda: False)
    original, tracker = integration_utils.rewrite_logs, Tracker()
    trainer = build(model_path, tmp_path, callbacks=[tracker], max_steps=2)
    trainer.args.report_to = ["trackio"]
    trainer.train()
    sections = {name.split("/")[0] for name in tracker.logged[0]}
    assert {"queue", "staleness", "engine", "time", "w", "clip", "train"} <= sections
    assert len(tracker.logged[0]) == len(trainer.state.log_history[0].keys() - {"step"})  # none is lost
    assert integration_utils.rewrite_logs is original
    assert [step for step, _ in trackio.logs] == [0]
    assert {trace.metadata["group_id"] for trace in trackio.logs[0][1]} == {0, 1}


def a_group(index, *, prompt="w1 w2", rollouts=4, episode=None):
    sampled = [Rollout([5, 6, 7], [-1.0] * 3, [2, 2, 3], "length", episode)] * rollouts
    scores = Score([[0.25 * number, 1.0] for number in range(rollouts)])
    return Group(Prompt(index, {"prompt": prompt}, [4, 5]), sampled, scores)


def test_a_trace_has_the_messages_and_what_is_known_of_the_rollout(trackio):
    TrackioTraces(tiny_tokenizer(), ["exact", "short"]).taken([a_group(7)], version=4)
    ((step, traces),) = trackio.logs
    assert step == 4 and len(traces) == 4
    assert traces[1].messages == [
        {"role": "user", "content": "w1 w2"},
        {"role": "assistant", "content": "w2 w3 w4"},
    ]
    assert traces[1].metadata == {
        "rewards/exact": 0.25,
        "rewards/short": 1.0,
        "group_id": 7,
        "model_version": 2,
        "staleness": 2,
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "finish_reason": "length",
    }


def test_an_episode_is_a_trace_with_the_messages_of_all_turns(trackio):
    asked = [{"role": "user", "content": "how warm is it?"}]
    played = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "20"}]
    episode = EpisodeRecord(asked, [4, 5], played, 1, turns=2)
    TrackioTraces(tiny_tokenizer(), ["a", "b"]).taken([a_group(0, prompt=asked, episode=episode)], version=3)
    assert trackio.logs[0][1][0].messages == [*asked, *played]


def test_only_some_versions_and_some_rollouts_of_every_group_are_logged(trackio):
    traces = TrackioTraces(tiny_tokenizer(), ["a", "b"])
    for version in range(2 * EVERY):
        traces.taken([a_group(number) for number in range(3)], version + 3)
    assert [step for step, _ in trackio.logs] == [3, 3 + EVERY]
    assert [trace.metadata["group_id"] for trace in trackio.logs[0][1]] == [0, 0, 1, 1, 2, 2]
    traces.taken([a_group(number) for number in range(3 * MOST)], version=100)
    assert len(trackio.logs[-1][1]) == MOST
