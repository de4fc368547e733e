"""The kept rollouts of a run are those that it trained, with what the loss saw at each token."""

import json
import logging
import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.runs import RunsAhead, TakeRecorder, build
from tests.tiny import tiny_tokenizer
from trl_a3po import A3POConfig
from trl_a3po.protocol.records import Group, Prompt, Rollout
from trl_a3po.report.logged_warnings import LoggedWarnings
from trl_a3po.report.recorded_settings import HIDDEN, recorded_settings
from trl_a3po.report.rollout_log import NAME, RolloutLog, is_kept
from trl_a3po.report.timeline import Timeline, read_timeline
from trl_a3po.report.token_texts import TokenTexts
from trl_a3po.session.hub import STAYS_HERE


def rollouts(trainer):
    return read_timeline(f"{trainer.args.output_dir}/{NAME}", "rollout")


@pytest.fixture(scope="module")
def trained(model_path, tmp_path_factory):
    trainer = build(model_path, tmp_path_factory.mktemp("kept"), TakeRecorder, max_staleness=3, max_steps=6)
    trainer.add_callback(RunsAhead(trainer, 4))
    trainer.train()
    return trainer


def test_every_trained_rollout_of_a_small_run_is_kept_as_it_was_sampled(trained):
    by_key = {(kept["prompt"], kept["rollout"]): kept for kept in rollouts(trained)}
    assert len(by_key) == len(rollouts(trained)) == 6 * 8
    for version, group in trained.groups:
        for number, rollout in enumerate(group.rollouts):
            kept = by_key[group.prompt.index, number]
            assert (kept["version"], kept["versions"]) == (version, rollout.versions)
            assert kept["rewards"] == {"reward": pytest.approx(group.score.rewards[number][0])}
            assert kept["behavior_logps"] == pytest.approx(rollout.logps, abs=1e-4)
            assert "".join(kept["tokens"]).split() == trained.processing_class.decode(rollout.token_ids).split()


def test_the_logged_metrics_are_those_of_the_kept_tokens(trained):
    kept, history = rollouts(trained), [e for e in trained.state.log_history if "a3po/rho/max" in e]
    for step, logged in enumerate(history):
        rows = [row for row in kept if row["version"] == step]
        pairs = [zip(row["policy_logps"], row["behavior_logps"], strict=True) for row in rows]
        rho = [math.exp(policy - behavior) for pair in pairs for policy, behavior in pair]
        assert max(rho) == pytest.approx(logged["a3po/rho/max"], rel=1e-3)
        weights = [weight for row in rows for weight in row["weights"]]
        assert sum(weights) / len(weights) == pytest.approx(logged["a3po/w/mean"], rel=1e-3)
        entropies = [entropy for row in rows for entropy in row["entropies"]]
        assert sum(entropies) / len(entropies) == pytest.approx(logged["a3po/entropy"], rel=1e-3)
        staleness = int(logged["a3po/staleness/max"])
        assert logged[f"a3po/d{staleness}/entropy"] == pytest.approx(logged["a3po/entropy"])


def test_whole_groups_are_kept_and_about_as_many_as_were_asked_for(model_path, tmp_path):
    trainer = build(model_path, tmp_path, max_steps=6, kept_rollouts=16)
    trainer.train()
    kept = rollouts(trainer)
    groups = {row["prompt"] for row in kept}
    assert len(kept) == 4 * len(groups) and abs(len(kept) - 16) <= 4
    assert groups == {prompt for prompt in range(12) if is_kept(prompt, 16 / 48)}


def test_a_run_that_keeps_none_writes_no_file(model_path, tmp_path):
    trainer = build(model_path, tmp_path, max_steps=1, kept_rollouts=0)
    trainer.train()
    assert not (tmp_path / "A3POTrainer" / NAME).exists()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.37, 1.0])
def test_kept_groups_are_spread_evenly(share):
    for start in (0, 1234, 10_000):
        kept = sum(is_kept(prompt, share) for prompt in range(start, start + 1000))
        assert abs(kept - 1000 * share) <= 4


def test_a_resumed_run_keeps_each_rollout_once(model_path, tmp_path):
    def run(**settings):
        return build(model_path, tmp_path, save_strategy="steps", save_steps=2, max_steps=4, **settings)

    run().train()
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "A3POTrainer" / "checkpoint-2"))
    kept = [(row["prompt"], row["rollout"]) for row in rollouts(resumed)]
    assert sorted(kept) == [(prompt, number) for prompt in range(8) for number in range(4)]


def test_the_periodic_schedule_keeps_every_rollout(model_path, tmp_path):
    trainer = build(model_path, tmp_path, TakeRecorder, schedule="periodic", max_steps=2)
    trainer.train()
    expected = {(g.prompt.index, n): r.versions for _, g in trainer.groups for n, r in enumerate(g.rollouts)}
    assert {(row["prompt"], row["rollout"]): row["versions"] for row in rollouts(trainer)} == expected


class CountedGathers:
    """A team of which every process gathers the same."""

    def __init__(self):
        self.gathers = 0

    def gather(self, value):
        self.gathers += 1
        return None


@pytest.mark.parametrize("of_this_process", [[], [0]])
def test_the_processes_meet_after_steps_of_which_something_is_kept_and_no_others(of_this_process):
    log, team, share = RolloutLog(tiny_tokenizer(), ["reward"]), CountedGathers(), 0.1
    log.begin_run(share)
    expected = 0
    for batch in range(10):
        groups = [Group(Prompt(4 * batch + i, {}, [5]), [Rollout([6], [-1.0], [0])], None, 0) for i in range(4)]
        for number, take in enumerate((groups[:2], groups[2:])):
            log.begin_take(take, first=number == 0)
        rows = [(groups[i], 0) for i in of_this_process]
        if rows:
            log.taken(rows, [0], [[0.5]], {"advantages": torch.zeros(1)}, batch)
        for _ in range(2):  # optimizer steps of the batch
            log.write(team, None)
        expected += 2 * any(is_kept(group.prompt.index, share) for group in groups)
    assert team.gathers == expected and 0 < expected < 20


def test_numbers_are_rounded_to_four_decimals():
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    log = RolloutLog(tiny_tokenizer(), ["reward"])
    log._untrained = {3: {"tokens": ["a"] * 2000}}
    log.trained(torch.tensor([3]), 1, policy_logps=noise[None])
    (kept,) = log._trained
    assert kept["policy_logps"] == [round(value, 4) for value in noise.tolist()]


class Copies(torch.Tensor):
    """A tensor of a device: counts how often the host waits for what it holds."""

    count = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Copies.count += func in (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__)
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else result


def test_the_numbers_of_a_micro_batch_are_copied_to_the_host_once():
    log = RolloutLog(tiny_tokenizer(), ["reward"])
    numbers = {name: torch.randn(3, 4).as_subclass(Copies) for name in ("policy_logps", "entropies")}
    log.trained(torch.arange(3), 1, **numbers)  # of which none is kept
    assert Copies.count == 0
    log._untrained = {place: {"tokens": ["a"] * (place + 1)} for place in range(3)}
    log.trained(torch.arange(3), 1, **numbers, weights=torch.ones(3, 1))
    assert [len(kept["entropies"]) for kept in log._trained] == [1, 2, 3]
    assert [kept["weights"] for kept in log._trained] == [[1], [1, 1], [1, 1, 1]]
    assert Copies.count == 1


def test_a_line_of_many_numbers_reads_as_any_other(tmp_path):
    timeline = Timeline(tmp_path / NAME, run="a", version=0, resumed=False)
    facts = {"tokens": ["a", "é", "🙂"], "logps": [-0.1234, None, 0.0], "versions": [3, -1], "rewards": {"a b": 1e-7}}
    timeline.write("rollout", **facts)
    timeline.write_many_numbers("rollout", facts)
    timeline.flush()
    one, other = read_timeline(tmp_path / NAME, "rollout")
    assert one | {"time": 0} == other | {"time": 0} and one["time"] <= other["time"]


def test_a_log_prob_that_is_not_a_number_is_null():
    log = RolloutLog(tiny_tokenizer(), ["reward"])
    log._untrained = {3: {"tokens": ["a", "b"]}}
    log.trained(torch.tensor([3]), 1, policy_logps=torch.tensor([[math.nan, -1.0, 0.0]]), weights=torch.ones(1, 1))
    (kept,) = log._trained
    assert (kept["policy_logps"], kept["weights"]) == ([None, -1.0], [1, 1])


def test_bytes_of_one_character_are_shown_at_its_last_token():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert texts.each(tokenizer.encode("aé🙂b").ids) == ["a", "", "é", "", "", "", "🙂", "b"]
    cut = texts.each(tokenizer.encode("a🙂").ids[:-1])
    assert cut[:3] == ["a", "", ""] and cut[3]


def test_secrets_are_not_recorded(tmp_path):
    args = A3POConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        hub_token="hf_abcdefghijklmnop",
        model_init_kwargs={"token": "hf_abcdefghijklmnop", "revision": "main"},
        chat_template_kwargs={"note": "hf_abcdefghijklmnop for http://me:word@localhost"},
    )
    recorded = recorded_settings(args)
    text = json.dumps(recorded)
    assert "hf_" not in text and "word@" not in text
    assert recorded["model_init_kwargs"] == {"token": HIDDEN, "revision": "main"}
    assert recorded["max_staleness"] == 4


def test_completions_are_not_uploaded():
    assert "rollouts*.jsonl" in STAYS_HERE


def test_warnings_are_in_the_timeline_and_still_printed(tmp_path, caplog):
    timeline = Timeline(tmp_path / "timeline.jsonl", run="a", version=0, resumed=False)
    warnings = LoggedWarnings(timeline)
    logger = logging.getLogger("trl_a3po.somewhere")
    for _ in range(2):
        logger.warning("the %s is slow", "reward")
    warnings.close()
    logger.warning("later")
    timeline.close()
    assert [line["text"] for line in read_timeline(tmp_path, "warning")] == ["the reward is slow"]
    assert caplog.messages == ["the reward is slow", "the reward is slow", "later"]


def test_warnings_are_printed_where_logging_is_not_configured(tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging, "lastResort", type("Stderr", (), {"handle": lambda self, r: printed.append(r)})())
    warnings = LoggedWarnings(Timeline(tmp_path / "timeline.jsonl", run="a", version=0, resumed=False))
    logging.getLogger("trl_a3po.somewhere").warning("slow")
    warnings.close()
    assert [record.getMessage() for record in printed] == ["slow"]
