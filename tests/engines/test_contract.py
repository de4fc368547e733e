"""The promises of `trl_a3po/protocol/engine.py`, kept by every engine."""

import contextlib
import copy
import itertools
import os
import signal
import sys
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.transformers.running import train
from tests.engines.vllm import stubbed
from tests.engines.vllm.real_vllm import vllm_python
from tests.engines.vllm.stub_server import StubServer, logp_of
from tests.engines.vllm.stubbed import stub_vllm_on_path
from tests.tiny import VOCAB, tiny_config
from tests.workers.processes import TIMEOUT, until
from trl_a3po.engines.several import SeveralEngines
from trl_a3po.engines.transformers.transformers_engine import TransformersEngine
from trl_a3po.engines.vllm.process.vllm_engine import VLLMEngine
from trl_a3po.engines.vllm.servers.vllm_servers import VLLMServers
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFailed, GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.collect import collect_weights, policy_spec
from trl_a3po.testing import StubEngine, completion_logps, scripted_completion

CLOSE_TIMEOUT = 30.0
START_TIMEOUT = 300.0
SAMPLING = SamplingSettings(max_new_tokens=24, stop_token_ids=(1,), seed=5)
PROMPT, COMPLETION = [5, 9, 12], [7, 40, 3]


class OnAModel:
    """An engine that samples from a tiny model, which the test trains. Its log-probs are those of a clean forward."""

    def __init__(self, make, can_die=True, **config):
        self.make = make
        self.can_die = can_die
        self.version = 0
        torch.manual_seed(0)
        self._models = {0: AutoModelForCausalLM.from_config(tiny_config(**config), dtype=torch.float32)}

    def start(self, engine, complete=True):
        update = collect_weights(self._models[0], 0, complete=True)
        engine.start(
            policy_spec(self._models[0], torch.float32), SAMPLING, WeightUpdate(0, update.tensors, complete=complete)
        )

    def next_update(self) -> WeightUpdate:
        model = copy.deepcopy(self._models[self.version])
        train(model)
        self.version += 1
        self._models[self.version] = model
        return collect_weights(model, self.version, complete=False)

    def old_update(self) -> WeightUpdate:
        return collect_weights(self._models[0], 0, complete=False)

    def logps(self, version, prompt_ids, token_ids) -> list[float]:
        return completion_logps(self._models[version], prompt_ids, token_ids, 1.0).tolist()

    def kill_worker(self, engine) -> None:
        worker = engine._engines[0] if isinstance(engine, SeveralEngines) else engine
        os.kill(worker.worker_pid, signal.SIGKILL)
        until(lambda: engine.stats().restarts > 0)

    def close(self):
        pass


class OnAStubServer:
    """vLLM's engine on two stub servers, whose log-probs say which version they are of."""

    can_die = True

    def __init__(self, folder):
        self._servers = [StubServer(step=0.005) for _ in range(2)]
        self._folder = folder
        self.version = 0

    def make(self):
        urls = [server.url for server in self._servers]
        return VLLMServers(urls, folder=self._folder, poll=0.05, start_timeout=TIMEOUT, outage_timeout=TIMEOUT)

    def start(self, engine, complete=True):
        update = stubbed.update(False, 0, complete=True)
        engine.start(
            policy_spec(stubbed.policy(False), torch.float32), SAMPLING, WeightUpdate(0, update.tensors, complete)
        )

    def next_update(self) -> WeightUpdate:
        self.version += 1
        return stubbed.update(False, self.version)

    def old_update(self) -> WeightUpdate:
        return stubbed.update(False, 0)

    def logps(self, version, prompt_ids, token_ids) -> list[float]:
        return [logp_of(version)] * len(token_ids)

    def kill_worker(self, engine) -> None:
        self._servers[0].kill()
        until(lambda: engine.stats().extra["servers_live"] == 1)
        self._servers[0] = self._servers[0].restarted()
        until(lambda: engine.stats().extra["servers_live"] == 2)

    def close(self):
        for server in self._servers:
            server.kill()


def transformers_engine() -> TransformersEngine:
    return TransformersEngine(slots=4, threads=1, start_timeout=TIMEOUT)


def stub_engine() -> StubEngine:
    return StubEngine(scripted_completion(VOCAB, SAMPLING.max_new_tokens))


def vllm_engine(python: str) -> VLLMEngine:
    return VLLMEngine(slots=4, python=python, threads=1, start_timeout=START_TIMEOUT)


CASES = ["stub", "transformers", "several", "vllm servers", "vllm", pytest.param("real vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    on_path = contextlib.nullcontext()
    match request.param:
        case "stub":
            case = OnAModel(stub_engine, can_die=False)
        case "transformers":
            case = OnAModel(transformers_engine)
        case "several":
            case = OnAModel(lambda: SeveralEngines([transformers_engine(), stub_engine()]))
        case "vllm servers":
            case = OnAStubServer(tmp_path_factory.mktemp("weights"))
        case "vllm":
            case = OnAModel(lambda: vllm_engine(sys.executable))
            on_path = stub_vllm_on_path()
        case "real vllm":
            case = OnAModel(lambda: vllm_engine(vllm_python()), head_dim=64)  # its CPU kernels know no smaller head
    with on_path:
        yield case
    case.close()


@pytest.fixture(scope="module")
def engine(case):
    """Started once for all tests of a case; the last test closes it."""
    engine = case.make()
    case.start(engine)
    yield engine
    engine.close()


numbers = itertools.count()


def requests(count: int, rollouts: int = 2) -> list[GroupRequest]:
    return [
        GroupRequest(number, number, (5 + number % 50, 6, 7), rollouts) for number in itertools.islice(numbers, count)
    ]


def events_of(engine, awaited: list[GroupRequest]) -> dict[int, GroupFinished | GroupFailed]:
    """The one event of each request."""
    events, deadline = {}, time.monotonic() + TIMEOUT
    while len(events) < len(awaited):
        assert time.monotonic() < deadline, engine.stats()
        for event in engine.wait(0.2):
            assert event.request_id not in events
            events[event.request_id] = event
    assert set(events) == {request.request_id for request in awaited}
    return events


def assert_sampled_from(case, engine, sent: list[GroupRequest], version: int) -> None:
    """Every rollout comes from the weights of `version`, by its stamps and by its log-probs."""
    events = events_of(engine, sent)
    for request in sent:
        for rollout in events[request.request_id].rollouts:
            assert set(rollout.versions) == {version}
            expected = case.logps(version, request.prompt_ids, rollout.token_ids)
            assert rollout.logps == pytest.approx(expected, abs=1e-4)


def test_every_request_ends_in_one_event_with_all_its_rollouts(engine):
    sent = requests(6, rollouts=3)
    engine.submit(sent)
    for event in events_of(engine, sent).values():
        assert isinstance(event, GroupFinished) and len(event.rollouts) == 3
    assert engine.wait(0.1) == []


def test_a_request_after_a_publish_is_sampled_from_it(case, engine):
    engine.publish(case.next_update())
    sent = requests(3)
    engine.submit(sent)
    assert_sampled_from(case, engine, sent, case.version)


def test_stamps_of_requests_in_flight_rise_and_are_never_newer_than_what_was_published(case, engine):
    before, sent = case.version, requests(8)
    engine.submit(sent)
    events = {}
    deadline = time.monotonic() + TIMEOUT
    while len(events) < len(sent):
        assert time.monotonic() < deadline
        engine.publish(case.next_update())
        for event in engine.wait(0.05):
            events[event.request_id] = event
            for rollout in event.rollouts:
                assert rollout.versions == sorted(rollout.versions)
                assert before <= rollout.versions[0] and rollout.versions[-1] <= case.version


def test_stats_can_be_read_from_any_thread_and_count_every_token(engine):
    # Before any request is cancelled: the tokens of a cancelled request count too, and are reported later.
    before, sent, errors = engine.stats().tokens, requests(4), []

    def read():
        try:
            for _ in range(50):
                engine.stats()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    engine.submit(sent)
    for thread in threads:
        thread.start()
    events = events_of(engine, sent)
    for thread in threads:
        thread.join(TIMEOUT)
    sampled = sum(len(rollout.token_ids) for event in events.values() for rollout in event.rollouts)
    assert not errors and engine.stats().tokens - before == sampled


def test_no_event_follows_a_cancelled_request_and_unknown_requests_are_ignored(engine):
    sent = requests(8)
    engine.submit(sent)
    engine.cancel([*(request.request_id for request in sent[::2]), 10**9])
    events_of(engine, sent[1::2])
    assert engine.wait(0.2) == []


def test_scores_are_those_of_the_version_that_was_published_last(case, engine):
    for _ in range(2):
        logps, version = engine.score(PROMPT, COMPLETION, TIMEOUT)
        assert version == case.version
        assert logps == pytest.approx(case.logps(version, PROMPT, COMPLETION), abs=1e-4)
        engine.publish(case.next_update())


@pytest.mark.parametrize(("prompt", "completion"), [([], COMPLETION), (PROMPT, [])])
def test_a_score_of_no_tokens_is_rejected(engine, prompt, completion):
    with pytest.raises(ValueError, match="score"):
        engine.score(prompt, completion, TIMEOUT)


def test_an_older_version_is_rejected(case, engine):
    engine.publish(case.next_update())
    with pytest.raises(ValueError, match=rf"Version 0 cannot be published after version {case.version}"):
        engine.publish(case.old_update())


def test_after_a_worker_died_every_request_has_its_event_and_the_weights_are_those_published_last(case, engine):
    if not case.can_die:
        pytest.skip("this engine has no worker")
    sent = requests(20)
    engine.submit(sent)
    case.kill_worker(engine)
    events_of(engine, sent)
    sent = requests(6)
    engine.submit(sent)
    assert_sampled_from(case, engine, sent, case.version)


def test_an_engine_that_was_not_started_says_so(case):
    engine = case.make()
    for use in (
        lambda: engine.submit(requests(1)),
        lambda: engine.wait(0.0),
        lambda: engine.cancel([0]),
        lambda: engine.publish(case.old_update()),
        lambda: engine.score(PROMPT, COMPLETION, 1.0),
    ):
        with pytest.raises(EngineError, match="was not started"):
            use()
    engine.close()


def test_the_first_update_must_be_complete(case):
    engine = case.make()
    with pytest.raises(ValueError, match="first update must be complete"):
        case.start(engine, complete=False)
    engine.close()


def test_close_is_bounded_and_may_be_repeated_also_with_requests_in_flight(engine):
    engine.submit(requests(8))
    began = time.monotonic()
    engine.close()
    engine.close()
    assert time.monotonic() - began < CLOSE_TIMEOUT
