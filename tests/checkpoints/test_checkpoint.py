"""The queue's state as files and back, in the middle of anything; and what makes a checkpoint folder valid."""

import json
import math
import os
import random
import re
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.queue_fakes import FakeEngine, make_prompts, make_rollout, update, zero_score
from trl_a3po.checkpoints import checkpoint, contents
from trl_a3po.checkpoints.choose_checkpoint import choose_checkpoint, newest_valid
from trl_a3po.checkpoints.queue_codec import decode_state, encode_state
from trl_a3po.checkpoints.saved_run import read_run
from trl_a3po.protocol.engine import GroupFailed, GroupFinished
from trl_a3po.protocol.records import EpisodeRecord, Rejection, Rollout, Score
from trl_a3po.rollout.outcomes import Outcomes
from trl_a3po.rollout.prompt_stream import PromptStream, TokenizedPrompt
from trl_a3po.rollout.queue import GenerationQueue
from trl_a3po.rollout.queue_core import QueueCore
from trl_a3po.rollout.queue_state import OutstandingState, QueueState
from trl_a3po.rollout.take_plan import TakePlan

BATCH, BOUND, TAKES = 3, 2, 12


def through_files(state, folder):
    values, tensors = encode_state(state)
    checkpoint.write_json(folder / checkpoint.STATE, values)
    checkpoint.write_tensors(folder / checkpoint.GROUPS, tensors)
    return decode_state(
        checkpoint.read_json(folder / checkpoint.STATE), checkpoint.read_tensors(folder / checkpoint.GROUPS)
    )


def stream(first_row=0, number=None, read=None):
    """Prompt n is `[1, n]`; what is tokenised is added to `read`."""
    rows = iter([{"number": n} for n in range(first_row, 1000 if number is None else number)])

    def tokenize(row):
        if read is not None:
            read.append(row["number"])
        return TokenizedPrompt([1, row["number"]])

    return PromptStream(rows, tokenize, first_row)


def make_core(prompts, *, bound=BOUND, takes=TAKES):
    return QueueCore(
        prompts=prompts,
        plan=TakePlan(BATCH, bound, lambda take: take, takes),
        num_rollouts=2,
        max_attempts=99,
        max_in_flight=None,
        max_rejected_in_a_row=99,
    )


def resumed_core(state, version, **kwargs):
    prompts = stream(state.first_row)
    core = make_core(prompts, **kwargs)
    tokens = {item.prompt_index: item.prompt_ids for item in state.outstanding}
    core.restore(state, prompts.fast_forward(state.cursor, tokens), version)
    core.published(version)
    return core


# --- state, files, state ------------------------------------------------------------------------------------------


def test_every_kind_of_outstanding_prompt_comes_back_to_the_last_bit(tmp_path):
    noise = random.Random(0)
    rollouts = [
        Rollout([5, 70000], [-noise.random(), -1e-300], [0, 1], "length"),
        Rollout([7], [-float(np.float32(noise.random()))], [3], "stop"),
    ]
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"x": 1}]}, {"role": "tool", "content": "3"}]
    episode = EpisodeRecord([{"role": "user", "content": "a"}], [1, 2], messages, 1, 2, 3, 1, 0, 0.25, "length",
                            {"Env": 0.1, "Other": None}, {"seen": [1, "b"]}, 7)  # fmt: skip
    several_turns = [Rollout([5, 9, 7], [-noise.random(), 0.0, -0.5], [2, -1, 3], "length", episode), rollouts[0]]
    score = Score([[0.1, math.nan], [1e-17, -2.0]], {"label": ["a", None]}, [("kl", 0.1), ("kl", 0.3)], 1.5)
    state = QueueState(
        next_take=4,
        cursor=17,
        published_version=3,
        last_taken_version=2,
        rejected_in_a_row=1,
        outcomes=Outcomes(17, 20, {"trained": 12, "rejected: dull": 1}, {"trained": 12}, 4, 2),
        outstanding=[
            OutstandingState(12, [1, 2], 3, 2, ["died"], rollouts, score, "1a"),
            OutstandingState(14, [3], 3, 1, [], rollouts[::-1], None),
            OutstandingState(13, [1, 2], 2, 1, [], several_turns, None),
            OutstandingState(15, [4, 5], 2, 1),
            OutstandingState(16, [6], 0, 3, ["a", "b"]),
        ],
        left_out={"with an overlong prompt": 2},
    )
    # repr writes a float's shortest exact form, and NaN as NaN
    assert repr(through_files(state, tmp_path)) == repr(state)


def test_an_empty_queue_comes_back(tmp_path):
    state = QueueState(0, 0, 0, 0, 0, Outcomes(0, 0, {}, {}, 0, 0), [])
    assert through_files(state, tmp_path) == state
    assert state.first_row == 0


def test_what_json_does_not_know_is_saved_as_text(tmp_path):
    logged = [Decimal("1.5"), {1: {2}}]
    score = Score([[0.0], [1.0]], {"parsed": logged, "numbers": [np.float32(0.5), (1, None)]})
    item = OutstandingState(0, [1], 0, 1, rollouts=[make_rollout([0]), make_rollout([0])], score=score)
    saved = through_files(QueueState(0, 1, 0, 0, 0, Outcomes(0, 0, {}, {}, 0, 0), [item]), tmp_path)
    assert saved.outstanding[0].score.extra_columns == {"parsed": ["1.5", {"1": "{2}"}], "numbers": [0.5, [1, None]]}


def test_what_numpy_and_torch_logged_is_saved_as_numbers(tmp_path):
    checkpoint.write_json(tmp_path / "x.json", [np.float32(0.5), np.arange(2), torch.ones(1), math.nan])
    assert repr(checkpoint.read_json(tmp_path / "x.json")) == "[0.5, [0, 1], [1.0], nan]"


def test_what_is_not_data_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"a PosixPath .* is neither a number, a string"):
        checkpoint.write_json(tmp_path / "x.json", [tmp_path])
    assert list(tmp_path.iterdir()) == []


# --- going on -----------------------------------------------------------------------------------------------------


class Trace:
    """Drives a core with random events and takes; kept apart from the core, so that it survives a resume."""

    def __init__(self, seed):
        self.noise = random.Random(seed)
        self.version = 0
        self.kept = []  # prompt indices trained, of the lineage
        self.rejected = 0

    def step(self, core):
        requests = core.submissions()
        self.engine.update({request.request_id: self.published for request in requests})
        core.prompts.fill(core.prompts_wanted)
        match self.noise.randrange(6):
            case 0 | 1 if self.engine:
                request_id = self.noise.choice(list(self.engine))
                began = self.engine.pop(request_id)
                stamps = [began, self.noise.randint(began, self.published)]
                core.engine_event(GroupFinished(request_id, [make_rollout(stamps)] * 2))
            case 2 if self.engine:
                request_id = self.noise.choice(list(self.engine))
                self.engine.pop(request_id)
                core.engine_event(GroupFailed(request_id, "died"))
            case 3 | 4 if (due := core.next_to_score()) is not None:
                rejects = self.noise.random() < 0.15
                self.rejected += rejects
                core.record_score(due[0], Rejection("dull") if rejects else zero_score(due[1]))
            case 5:
                if self.noise.random() < 0.7 and self.published < self.version:
                    self.published = self.version
                    core.published(self.version)
                if (groups := core.try_take(self.version)) is not None:
                    for group in groups:
                        stamps = [v for rollout in group.rollouts for v in rollout.versions]
                        assert 0 <= self.version - min(stamps) <= BOUND
                        assert self.version >= max(stamps)
                        self.kept.append(group.prompt.index)
                    self.version += 1

    def start(self, version):
        """A process begins: its engine has nothing in flight and samples from `version`."""
        self.engine = {}
        self.published = version


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_however_often_a_run_is_cut_off_every_prompt_is_trained_once_within_the_bound(seed):
    trace = Trace(seed)
    core = make_core(stream())
    trace.start(0)
    core.prompts.fill(core.prompts_wanted)
    checkpoints = [(core.state(), 0, [], 0)]
    for _ in range(20000):
        if core.next_take == TAKES:
            break
        trace.step(core)
        if trace.noise.random() < 0.05:
            checkpoints.append((core.state(), trace.version, list(trace.kept), trace.rejected))
        if trace.noise.random() < 0.02:  # cut off: what happened since the checkpoint is not of the lineage
            values, tensors = encode_state(checkpoints[-1][0])
            state = decode_state(json.loads(json.dumps(values)), tensors)
            _, trace.version, kept, trace.rejected = checkpoints[-1]
            trace.kept = list(kept)
            trace.start(trace.version)
            core = resumed_core(state, trace.version)
            core.prompts.fill(core.prompts_wanted)
    assert core.next_take == TAKES
    assert len(trace.kept) == len(set(trace.kept)) == BATCH * TAKES
    core.close()
    outcomes = core.outcomes()
    assert outcomes.open_prompts == outcomes.open_attempts == 0
    assert outcomes.count("trained") == BATCH * TAKES and outcomes.count("rejected") == trace.rejected
    assert outcomes.prompts == sum(outcomes.prompt_outcomes.values()) == core.prompts.cursor
    assert outcomes.attempts == sum(outcomes.attempt_outcomes.values())


def test_order_is_kept_and_what_was_in_flight_is_sampled_again_at_its_place():
    core = make_core(stream())
    core.prompts.fill(99)
    requests = core.submissions()
    for position in (0, 2):
        core.engine_event(GroupFinished(requests[position].request_id, [make_rollout([0])] * 2))
    core.record_score(core.next_to_score()[0], Score([[1.0], [2.0]]))
    core.next_to_score()  # being scored when the state is taken
    again = resumed_core(core.state(), 0)
    assert [item.prompt.index for item in again.order] == list(range(len(core.order)))
    assert [item.stage for item in again.order[:3]] == ["ready", "to submit", "waiting for its reward"]
    again.prompts.fill(99)
    submitted = [request.noise_key for request in again.submissions()]
    assert submitted == [1, *range(3, len(core.order))]
    assert [item.attempt for item in again.order] == [1] * len(core.order)


def test_failed_attempts_are_remembered():
    core = make_core(stream())
    core.prompts.fill(99)
    core.engine_event(GroupFailed(core.submissions()[0].request_id, "out of memory"))
    again = resumed_core(core.state(), 0)
    again.prompts.fill(99)
    again.submissions()
    assert (again.order[0].attempt, again.order[0].failures) == (2, ["out of memory"])


def test_rows_that_are_done_with_are_neither_read_nor_tokenised():
    core = make_core(stream())
    core.prompts.fill(99)
    for request in core.submissions()[: BATCH + 1]:
        core.engine_event(GroupFinished(request.request_id, [make_rollout([0])] * 2))
        core.record_score(core.next_to_score()[0], Score([[1.0], [2.0]]))
    core.try_take(0)
    state, read = core.state(), []
    assert state.first_row == BATCH
    prompts = stream(state.first_row, read=read)
    outstanding = {item.prompt_index for item in state.outstanding}
    prompts.fast_forward(state.cursor, dict.fromkeys(outstanding - {BATCH + 1}))
    assert read == [n for n in range(BATCH, state.cursor) if n != BATCH + 1]
    prompts.fill(1)
    assert prompts.pop().index == state.cursor


def test_a_stream_that_has_become_shorter_is_refused():
    with pytest.raises(ValueError, match="ends after 5 rows, but 9 had been used"):
        stream(3, number=5).fast_forward(9, {})


def test_prompts_keep_their_tokens_and_rows_are_not_tokenised_again():
    core = make_core(stream())
    core.prompts.fill(99)
    core.submissions()
    state, read = core.state(), []
    prompts = stream(state.first_row, read=read)
    found = prompts.fast_forward(state.cursor, {0: [7, 7], 1: None})
    assert (found[0].token_ids, found[1].token_ids, read) == ([7, 7], [1, 1], [1])


def test_a_queue_that_refused_its_state_closes_without_an_error():
    core = make_core(stream())
    core.prompts.fill(99)
    for request in core.submissions()[:2]:
        core.engine_event(GroupFinished(request.request_id, [make_rollout([0])] * 2))
    state = core.state()
    state.outstanding[1] = replace(state.outstanding[1], prompt_digest="another prompt")
    prompts = stream(state.first_row)
    again = make_core(prompts)
    tokens = {item.prompt_index: item.prompt_ids for item in state.outstanding}
    with pytest.raises(ValueError, match="Prompt 1 of the prompt stream is not the one it was"):
        again.restore(state, prompts.fast_forward(state.cursor, tokens), 0)
    assert again.close() == [] and again.outcomes().prompts == 0


def test_a_state_without_rollouts_samples_every_outstanding_prompt_again():
    core = make_core(stream())
    core.prompts.fill(99)
    for request in core.submissions()[:2]:
        core.engine_event(GroupFinished(request.request_id, [make_rollout([0])] * 2))
    again = resumed_core(core.state().without_rollouts(keeps_prompts=True), 0)
    again.prompts.fill(99)
    assert len(again.submissions()) == len(again.order) == 3 * BATCH
    outcomes = again.outcomes()
    assert outcomes.attempt_outcomes["unused: sampled again with other settings"] == 2
    assert outcomes.attempts == sum(outcomes.attempt_outcomes.values()) + outcomes.open_attempts


def test_a_state_without_unscored_rollouts_samples_those_prompts_alone_again():
    core = make_core(stream())
    core.prompts.fill(99)
    for request in core.submissions()[:2]:
        core.engine_event(GroupFinished(request.request_id, [make_rollout([0])] * 2))
    core.record_score(core.next_to_score()[0], Score([[0.0]] * 2))
    again = resumed_core(core.state().without_unscored_rollouts(), 0)
    again.prompts.fill(99)
    assert len(again.submissions()) == len(again.order) - 1
    outcomes = again.outcomes()
    assert outcomes.attempts == sum(outcomes.attempt_outcomes.values()) + outcomes.open_attempts


def test_groups_too_old_for_a_smaller_bound_are_refused():
    core = make_core(stream())
    core.prompts.fill(99)
    for request in core.submissions():
        core.engine_event(GroupFinished(request.request_id, [make_rollout([0])] * 2))
    with pytest.raises(ValueError, match="group of version 0 for the take at version 2, which max_staleness=1"):
        resumed_core(core.state(), 0, bound=1)


def test_a_run_made_shorter_samples_nothing_it_cannot_train():
    core = make_core(stream())
    core.prompts.fill(99)
    assert len(core.submissions()) == 3 * BATCH
    shorter = resumed_core(core.state(), 0, takes=2)
    shorter.prompts.fill(99)
    assert len(shorter.submissions()) == 2 * BATCH


def test_a_queue_at_work_is_saved_and_taken_up_by_another(tmp_path):
    def queue(engine, prompts):
        return GenerationQueue(
            engine=engine,
            prompts=prompts,
            score=zero_score,
            groups_per_batch=BATCH,
            num_rollouts=2,
            max_staleness=BOUND,
            version_of_take=lambda take: take,
            total_takes=TAKES,
            stall_timeout=20,
        )

    trained, state, noise = [], None, random.Random(5)
    for stop in (4, 5, TAKES):
        version = 0 if state is None else state.next_take
        engine = FakeEngine(delay=lambda request: noise.random() * 0.02, version=version)
        with queue(engine, stream(0 if state is None else state.first_row)) as running:
            if state is not None:
                running.restore(state, version)
            running.start(version)
            for take in range(version, stop):
                if take > version:
                    running.publish(update(take))
                trained += [group.prompt.index for group in running.take(take)]
            state = through_files(running.state(), tmp_path)
    assert sorted(trained) == list(range(BATCH * TAKES))
    assert state.outstanding == [] and state.cursor == BATCH * TAKES


def test_the_state_of_a_queue_that_failed_is_not_given_out():
    engine = FakeEngine()
    engine.error = RuntimeError("lost")
    running = GenerationQueue(
        engine=engine,
        prompts=make_prompts(),
        score=zero_score,
        groups_per_batch=1,
        num_rollouts=1,
        max_staleness=0,
        version_of_take=lambda take: take,
        total_takes=1,
    )
    with running:
        running.start(0)
        with pytest.raises(Exception, match="lost"):
            running.take(0)
        with pytest.raises(Exception, match="lost"):
            running.state()


# --- folders ------------------------------------------------------------------------------------------------------


def write_checkpoint(folder, step=1, run=None):
    before = checkpoint.begin(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "global_step1").mkdir(exist_ok=True)
    (folder / "global_step1" / "rank0.pt").write_bytes(b"moments")
    checkpoint.write_json(folder / checkpoint.STATE, {"step": step})
    checkpoint.complete(folder, step, run, before)
    return folder


def test_the_marker_does_not_vouch_for_what_lay_in_the_folder_before(tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "model.safetensors").write_bytes(b"earlier")
    write_checkpoint(folder)
    (folder / "notes.txt").unlink()
    assert checkpoint.why_invalid(folder) is None and checkpoint.why_damaged(folder) is None


def test_a_file_of_another_checkpoint_is_noticed_also_at_the_same_size(tmp_path):
    one = write_checkpoint(tmp_path / "checkpoint-1", 1)
    (one / "model.safetensors").write_bytes(b"another")
    assert checkpoint.why_invalid(one) is None and "damaged model.safetensors" in checkpoint.why_damaged(one)
    two = write_checkpoint(tmp_path / "checkpoint-2", 2)
    (two / "a3po_batch_0.safetensors").write_bytes(b"of another checkpoint")
    assert checkpoint.why_damaged(two) == "has a a3po_batch_0.safetensors that does not belong to it"


def test_a_large_file_of_another_checkpoint_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "WHOLE_BYTES", 1000)
    random_bytes = np.random.default_rng(0).bytes
    one, other, path = random_bytes(3_000_000), random_bytes(3_000_000), tmp_path / "file"
    digests = []
    for data in (one, other, one, one[:-1], one[:-1] + bytes([one[-1] ^ 1])):
        path.write_bytes(data)
        digests.append(contents.digest_of_contents(path))
    assert digests[0] == digests[2] and len(set(digests)) == 4


def test_a_complete_folder_is_valid_and_its_marker_names_every_file(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint-1")
    assert checkpoint.why_invalid(folder) is None
    marker = checkpoint.read_json(folder / checkpoint.MARKER)
    assert marker["policy_version"] == 1
    assert marker["files"] == {"a3po_state.json": 11, "global_step1/rank0.pt": 7, "model.safetensors": 7}


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda f: (f / checkpoint.MARKER).unlink(), "writing it was cut short"),
        (lambda f: (f / checkpoint.MARKER).write_text('{"format": 2, "fi'), "cannot be read"),
        (lambda f: (f / checkpoint.MARKER).write_text('{"format": 99, "files": {}}'), "has format 99"),
        (lambda f: (f / "model.safetensors").write_bytes(b"weigh"), "model.safetensors of 5 bytes instead of 7"),
        (lambda f: (f / "global_step1" / "rank0.pt").unlink(), "lacks global_step1/rank0.pt"),
        (lambda f: checkpoint.begin(f), "writing it was cut short"),
    ],
    ids=["no marker", "half a marker", "other format", "truncated", "missing", "begun again"],
)
def test_a_damaged_folder_is_not_valid_and_says_why(tmp_path, damage, reason):
    folder = write_checkpoint(tmp_path / "checkpoint-1")
    damage(folder)
    assert re.search(reason, checkpoint.why_invalid(folder))


def test_a_folder_cut_short_while_its_marker_was_written_can_be_written_again(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-1"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", lambda *paths: None)
        write_checkpoint(folder)
    assert "writing it was cut short" in checkpoint.why_invalid(folder)
    assert checkpoint.why_invalid(write_checkpoint(folder)) is None


def test_the_newest_valid_one_is_the_one_written_last_and_higher_steps_are_named(tmp_path, caplog):
    for step, run in ((2, "old"), (4, "old"), (6, "new"), (2, "new"), (3, "new")):
        write_checkpoint(tmp_path / f"checkpoint-{step}", step, run)
    assert newest_valid(tmp_path).name == "checkpoint-3"
    assert [record.getMessage().split(" by ")[1] for record in caplog.records] == [
        "this run before it went back: give its path to go on from it.",
        "another run: give its path to go on from it.",
    ]


def test_what_is_written_later_is_newer_also_when_the_clock_was_set_back(tmp_path, monkeypatch):
    for step, clock in ((4, 2e9), (2, 1e9), (3, 1e9)):
        monkeypatch.setattr(checkpoint.time, "time", lambda clock=clock: clock)
        write_checkpoint(tmp_path / f"checkpoint-{step}", step)
        assert newest_valid(tmp_path).name == f"checkpoint-{step}"


def test_the_files_times_decide_nothing(tmp_path):
    for step in (2, 1):
        write_checkpoint(tmp_path / f"checkpoint-{step}", step)
    for path in (tmp_path / "checkpoint-2").rglob("*"):
        os.utime(path, (3e9, 3e9))
    assert newest_valid(tmp_path).name == "checkpoint-1"


def test_markers_without_a_time_count_by_step_and_are_older(tmp_path):
    def age(folder):
        marker = checkpoint.read_json(folder / checkpoint.MARKER)
        (folder / checkpoint.MARKER).write_text(json.dumps({k: marker[k] for k in ("format", "files")}))

    for step in (10, 9):
        age(write_checkpoint(tmp_path / f"checkpoint-{step}", step))
    assert newest_valid(tmp_path).name == "checkpoint-10"
    assert checkpoint.run_of(tmp_path / "checkpoint-10") is None
    write_checkpoint(tmp_path / "checkpoint-1")
    assert newest_valid(tmp_path).name == "checkpoint-1"


def test_the_newest_valid_one_is_not_one_without_a_marker(tmp_path):
    for step in (8, 9, 10, 11):
        write_checkpoint(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-11" / checkpoint.MARKER).unlink()
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_valid(tmp_path).name == "checkpoint-10"


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    checkpoint.write_json(path, {"old": 1})

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.write_json(path, {"new": 2})
    assert checkpoint.read_json(path) == {"old": 1}


def test_a_file_of_ours_that_has_changed_is_refused_and_an_older_checkpoint_taken(tmp_path, caplog):
    folders = [tmp_path / f"checkpoint-{step}" for step in (1, 2)]
    for step, folder in enumerate(folders, start=1):
        checkpoint.begin(folder)
        checkpoint.write_json(folder / checkpoint.STATE, {"a": step})
        (folder / "model.safetensors").write_bytes(b"weights")
        checkpoint.complete(folder, step)
    changed = folders[1] / checkpoint.STATE
    changed.write_text(changed.read_text().replace("2", "3"))  # of the same size
    assert newest_valid(tmp_path) == folders[0]
    assert f"{folders[1]} has a damaged {checkpoint.STATE}" in caplog.text
    with pytest.raises(ValueError, match=f"damaged {checkpoint.STATE}: its content has changed"):
        choose_checkpoint(str(folders[1]), str(tmp_path))


def test_a_checkpoint_may_be_given_by_its_path_in_the_home_folder(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "checkpoint-1")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_checkpoint("~/checkpoint-1", "elsewhere") == tmp_path / "checkpoint-1"


def test_a_checkpoint_of_someone_else_is_refused_with_what_is_wrong(tmp_path):
    checkpoint.begin(tmp_path)
    checkpoint.write_json(tmp_path / checkpoint.STATE, {"format": checkpoint.FORMAT, "queue": {"next_take": 1}})
    checkpoint.write_tensors(tmp_path / checkpoint.GROUPS, {"lengths": torch.zeros(1)})
    with pytest.raises(ValueError, match="do not hold what this version of trl_a3po writes \\(KeyError: "):
        read_run(tmp_path)
