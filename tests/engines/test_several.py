"""Several engines as one: shared work, common publishes, a check that reaches each of them."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runs import COMPLETE, LENGTH
from tests.tiny import save_tiny_model, tiny_config, tiny_prompts
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.engines.several import SeveralEngines
from trl_a3po.errors import DeliveryError
from trl_a3po.protocol.engine import EngineStats, GroupRequest, SamplingSettings
from trl_a3po.publish.collect import collect_weights, policy_spec
from trl_a3po.testing import StubEngine


def started(*engines):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    several = SeveralEngines(engines)
    several.start(
        policy_spec(model, torch.float32), SamplingSettings(LENGTH), collect_weights(model, 0, complete=True)
    )
    return several, model


def request(number, rollouts=2):
    return GroupRequest(number, number, (5, 6, 7 + number), rollouts)


def test_a_request_goes_to_the_engine_with_the_least_to_do():
    one, other = StubEngine(COMPLETE), StubEngine(COMPLETE)
    several, _ = started(one, other)
    several.submit([request(0, 6), request(1), request(2), request(3, 2), request(4)])
    assert [r.request_id for r in one.requests] == [0, 4] and [r.request_id for r in other.requests] == [1, 2, 3]
    assert sorted(event.request_id for event in several.wait(1.0) + several.wait(1.0)) == [0, 1, 2, 3, 4]
    several.submit([request(5), request(6)])
    assert {r.request_id for r in one.requests} == {0, 4, 5} and {r.request_id for r in other.requests} == {1, 2, 3, 6}


def test_later_turns_go_to_the_engine_that_sampled_the_first_until_the_episode_is_over():
    one, other = StubEngine(COMPLETE), StubEngine(COMPLETE)
    several, _ = started(one, other)
    several.submit([replace(request(0), first_episode=0), replace(request(1), first_episode=2)])
    several.wait(1.0)
    later = [replace(request(number, 1), first_episode=3, first_position=2) for number in (2, 3, 4)]
    several.submit(later[:2])
    assert [r.request_id for r in other.requests] == [1, 2, 3]
    several.end_episodes([3])
    several.submit(later[2:])
    assert [r.request_id for r in one.requests] == [0, 4]


def test_what_the_engines_count_is_added_up():
    engines = [StubEngine(COMPLETE), StubEngine(COMPLETE)]
    for engine, counted in zip(engines, (2, 5), strict=True):
        engine.stats = lambda counted=counted: EngineStats(tokens=counted, turns_prefilled_again=10 * counted)
    stats = SeveralEngines(engines).stats()
    assert (stats.tokens, stats.turns_prefilled_again) == (7, 70)


def test_a_cancelled_request_is_no_load():
    one, other = StubEngine(COMPLETE), StubEngine(COMPLETE)
    several, _ = started(one, other)
    several.submit([request(0, 6)])
    several.cancel([0])
    assert several.wait(0.0) == []
    several.submit([request(1)])
    assert [r.request_id for r in one.requests] == [0, 1]


def test_every_engine_has_a_version_once_it_is_published():
    engines = [StubEngine(COMPLETE) for _ in range(3)]
    several, model = started(*engines)
    several.publish(collect_weights(model, 4, complete=False))
    assert [engine.version for engine in engines] == [4, 4, 4]
    several.close()
    assert all(engine.closed for engine in engines)


def test_as_many_texts_as_engines_are_scored_by_all_of_them():
    class Counts(StubEngine):
        scored = 0

        def score(self, *args):
            self.scored += 1
            return super().score(*args)

    engines = [Counts(COMPLETE) for _ in range(3)]
    several, _ = started(*engines)
    for _ in range(2):
        for text in range(3):
            several.score([5, 6], [7 + text], 1.0)
    assert [engine.scored for engine in engines] == [2, 2, 2]


class SkipsPublishes(StubEngine):
    def publish(self, update):
        if update.complete:
            super().publish(update)
        self.version = update.version


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def trainer(model_path, tmp_path, **settings):
    args = A3POConfig(
        log_all_metrics=True,
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=LENGTH,
        max_steps=3,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        model_init_kwargs={"dtype": "float32"},
        **settings,
    )
    return A3POTrainer(model_path, lambda completions, **k: [0.5] * len(completions), args, tiny_prompts())


def test_one_engine_of_several_that_does_not_follow_is_caught(model_path, tmp_path):
    several = SeveralEngines([StubEngine(COMPLETE), SkipsPublishes(COMPLETE)])
    with pytest.raises(DeliveryError, match="perturbed copy"):
        trainer(model_path, tmp_path, engine=several).train()


@pytest.mark.long
def test_two_workers_share_a_run(model_path, tmp_path):
    run = trainer(model_path, tmp_path, engine_device=["cpu", "cpu"], engine_threads=1, max_staleness=1)
    run.train()
    assert run.state.global_step == 3
    gaps = [entry["a3po/engine_gap/max"] for entry in run.state.log_history if "a3po/engine_gap/max" in entry]
    assert gaps and max(gaps) < 1e-4
