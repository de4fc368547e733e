"""The delivery check inside a run: it catches, it logs, and it changes nothing."""

import re

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig

from tests.publish.test_delivery import OtherTemperature, SkipsAllAdapters, StopsFollowing
from tests.runs import COMPLETE, build, logged
from tests.tiny import tiny_prompts
from trl_a3po.errors import DeliveryError
from trl_a3po.report.engine_gap import EngineGap
from trl_a3po.testing import StubEngine

pytestmark = pytest.mark.long


def lora():
    return LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2)


class CountsScores(StubEngine):
    scores = 0

    def score(self, *arguments):
        self.scores += 1
        return super().score(*arguments)


@pytest.mark.parametrize("peft_config", [None, lora()], ids=["full", "lora"])
def test_training_is_the_same_with_and_without_the_check(model_path, tmp_path, peft_config):
    trained = []
    for steps in (0, 1):
        trainer = build(model_path, tmp_path, peft_config=peft_config, max_steps=3, delivery_check_steps=steps)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        trained.append(list(trainer.model.parameters()))
        assert any(not torch.equal(a, b) for a, b in zip(before, trained[-1], strict=True))
    assert all(torch.equal(without, checked) for without, checked in zip(*trained, strict=True))


def test_without_the_check_nothing_is_scored_and_nothing_perturbed(model_path, tmp_path):
    engine = CountsScores(COMPLETE)
    trainer = build(model_path, tmp_path, engine=engine, max_steps=3, delivery_check_steps=0)
    trainer.train()
    assert engine.scores == 0 and engine.published == [0, 1, 2]
    assert logged(trainer, "a3po/delivery/gap") == []


def test_the_gap_is_logged_at_start_and_every_so_many_steps(model_path, tmp_path):
    trainer = build(model_path, tmp_path, max_steps=6, delivery_check_steps=2)
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if "a3po/delivery/gap" in entry]
    assert steps == [1, 3, 5]  # before steps 1, 3 and 5: versions 0, 2 and 4
    assert max(logged(trainer, "a3po/delivery/gap")) < 1e-4


def test_what_an_evaluation_publishes_is_checked_too(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, max_steps=4, delivery_check_steps=2, weight_sync_steps=8, max_staleness=8,
        eval_dataset=tiny_prompts(4), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "a3po/delivery/gap" in entry] == [1, 3]


def test_the_gap_on_fresh_tokens_is_logged_for_the_first_optimizer_step_of_a_batch(model_path, tmp_path):
    trainer = build(model_path, tmp_path, max_steps=4, num_iterations=2)
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if "a3po/engine_gap/mean" in entry]
    assert steps == [1, 3]
    assert 0 < max(logged(trainer, "a3po/engine_gap/max")) < 1e-4


@pytest.mark.parametrize(
    "engine, message",
    [
        (SkipsAllAdapters(COMPLETE), "but the engine's by 0"),
        (OtherTemperature(COMPLETE, 0.7), "another temperature"),
        (StopsFollowing(COMPLETE), "was published, but the engine's log-probs"),
    ],
    ids=["adapter", "temperature", "later"],
)
def test_a_faulty_engine_ends_the_run_and_is_closed(model_path, tmp_path, engine, message):
    trainer = build(
        model_path,
        tmp_path,
        engine=engine,
        peft_config=lora(),
        max_steps=10,
        delivery_check_steps=2,
        learning_rate=1.0,
    )
    with pytest.raises(DeliveryError, match=message):
        trainer.train()
    assert engine.closed


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_both_ways_to_send_an_adapter_pass(model_path, tmp_path, sync):
    trainer = build(
        model_path, tmp_path, peft_config=lora(), lora_sync=sync, max_steps=3, delivery_check_steps=1, temperature=0.7
    )
    trainer.train()
    assert len(logged(trainer, "a3po/delivery/gap")) == 3


def test_streams_are_checked_with_their_first_prompts(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, train_dataset=tiny_prompts().to_iterable_dataset(), max_steps=2, delivery_check_steps=1
    )
    trainer.train()
    assert len(logged(trainer, "a3po/delivery/gap")) == 2


def test_the_check_does_not_start_a_stream_again(model_path, tmp_path):
    started = []
    for steps in (0, 1):

        def rows():
            started[-1] += 1
            yield from tiny_prompts()

        started.append(0)
        stream = IterableDataset.from_generator(rows)
        build(model_path, tmp_path, train_dataset=stream, max_steps=2, delivery_check_steps=steps).train()
    assert started[0] == started[1]


@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_a_run_says_what_it_does_at_its_start_unless_progress_is_switched_off(
    model_path, tmp_path, capsys, disable_tqdm
):
    trainer = build(model_path, tmp_path, max_steps=1, delivery_check_steps=1)
    trainer.args.disable_tqdm = disable_tqdm
    trainer.train()
    printed = capsys.readouterr().out
    assert bool(re.search(r"starting the engine … done in \d", printed)) is not disable_tqdm
    assert bool(re.search(r"checking the delivery of weights … done in \d", printed)) is not disable_tqdm


def test_fresh_tokens_count_and_where_caches_are_kept_only_in_completions_of_one_version():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    versions = torch.tensor([[5, 5, 5], [4, 5, -1], [4, 4, 4]])
    lb = torch.zeros(3, 3)
    lt = torch.tensor([[0.1, -0.3, 0.2], [9.0, 0.8, float("nan")], [9.0, 9.0, 9.0]])

    def metrics(version, single_version):
        return EngineGap.of_batch(lt, lb, versions, mask, version=version, single_version=single_version).metrics()

    kept = metrics(5, True)
    assert kept == {"a3po/engine_gap/mean": pytest.approx(0.2), "a3po/engine_gap/max": pytest.approx(0.3)}
    recomputed = metrics(5, False)
    assert recomputed["a3po/engine_gap/mean"] == pytest.approx(1.4 / 4)
    assert metrics(6, True) == {}  # a later optimizer step of the batch
    spanning = EngineGap.of_kept_caches(lt, lb, versions, mask, version=5).metrics()
    assert spanning == {"a3po/kept_cache_gap/mean": pytest.approx(0.8), "a3po/kept_cache_gap/max": pytest.approx(0.8)}
