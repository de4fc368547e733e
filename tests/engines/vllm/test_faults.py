"""What stub servers do wrong is bounded, counted, and loses nothing."""

import pytest

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import finished, requests, started, until, update
from trl_a3po.engines.vllm.servers import rollout_jobs
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFailed


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        ("hang", "timeouts"),
        ("drip", "timeouts"),
        ("garbage", "garbage_answers"),
        ("500", "calls_failed"),
        ("reset", "calls_failed"),
    ],
)
def test_a_faulty_answer_is_asked_for_again(tmp_path, lora, fault, counter):
    (server,) = servers = [StubServer(lora=lora)]
    engine = started(servers, tmp_path, request_timeout=2.0, outage_timeout=10.0)
    try:
        server.faults = [fault]
        engine.submit(requests(3))
        finished(engine, 3)
        assert engine.stats().extra[counter] >= 1
    finally:
        engine.close()


@pytest.mark.parametrize("fault", ["misaligned", "nan"])
def test_an_answer_that_does_not_add_up_is_garbage(tmp_path, fault):
    (server,) = servers = [StubServer(lora=True)]
    engine = started(servers, tmp_path)
    try:
        server.faults = [fault]
        engine.submit(requests(1))
        finished(engine, 1)
        assert engine.stats().extra["garbage_answers"] == 1
    finally:
        engine.close()


def test_a_request_that_keeps_failing_fails_with_the_servers_words(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_jobs, "MOST_BACKOFF", 0.1)
    (server,) = servers = [StubServer(lora=True)]
    engine = started(servers, tmp_path)
    try:
        server.faults = ["500"] * 5
        engine.submit(requests(1))
        events = []
        until(lambda: events.extend(engine.wait(0.1)) or events)
        assert isinstance(events[0], GroupFailed) and "EngineCore encountered an issue" in events[0].reason
        engine.submit(requests(1, first=1))
        finished(engine, 1)
    finally:
        engine.close()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_work_of_a_killed_server_is_done_by_the_other_and_it_comes_back_with_the_weights(tmp_path, lora):
    servers = [StubServer(lora=lora, step=0.01) for _ in range(2)]
    engine = started(servers, tmp_path)
    try:
        engine.submit(requests(8))
        until(lambda: servers[0].tokens > 10)
        servers[0].kill()
        until(lambda: engine.stats().extra["servers_live"] == 1)
        engine.publish(update(lora, 1))
        finished(engine, 8)
        back = servers[0].restarted()
        until(lambda: engine.stats().extra["servers_live"] == 2)
        assert list(back.adapters.values()) == [1.0] if lora else back.weight == 1.0
        engine.submit(requests(8, first=8))
        events = finished(engine, 8)
        assert all(min(r.versions) == 1 for event in events.values() for r in event.rollouts)
        assert back.served > 0
        extra = engine.stats().extra
        assert extra["servers_lost"] == 1 and extra["servers_back"] == 1
    finally:
        engine.close()


def test_a_server_that_is_back_is_not_lost_for_adapters_it_never_had(tmp_path):
    servers = [StubServer(lora=True) for _ in range(2)]
    engine = started(servers, tmp_path, kept_versions=2)
    try:
        for version in (1, 2):
            engine.publish(update(True, version))
        servers[0].kill()
        until(lambda: engine.stats().extra["servers_live"] == 1)
        back = servers[0].restarted()
        until(lambda: engine.stats().extra["servers_live"] == 2)
        for version in (3, 4, 5):  # by which the older ones are unloaded
            engine.publish(update(True, version))
        assert engine.stats().extra["servers_lost"] == 1
        assert sorted(back.adapters.values()) == [4.0, 5.0]
    finally:
        engine.close()


def test_a_server_that_dies_during_a_publish_does_not_stop_it(tmp_path):
    servers = [StubServer(step=0.01) for _ in range(2)]
    engine = started(servers, tmp_path)
    try:
        engine.submit(requests(6))
        until(lambda: servers[0].tokens > 10)
        servers[0].kill()
        engine.publish(update(False, 1))
        finished(engine, 6)
        assert engine.stats().extra["servers_live"] == 1
    finally:
        engine.close()


def test_without_any_server_the_run_ends_with_one_error_after_the_limit(tmp_path):
    servers = [StubServer(lora=True, step=0.01) for _ in range(2)]
    engine = started(servers, tmp_path, outage_timeout=0.6)
    try:
        engine.submit(requests(6))
        until(lambda: all(server.tokens > 0 for server in servers))
        for server in servers:
            server.kill()
        with pytest.raises(EngineError, match=r"No vLLM server has been able to sample for 0\.6 s"):
            while True:
                engine.wait(0.1)
        with pytest.raises(EngineError, match="resume from the last checkpoint"):
            engine.publish(update(True, 1))
    finally:
        engine.close()


def test_an_outage_shorter_than_the_limit_loses_nothing(tmp_path):
    (server,) = servers = [StubServer(step=0.01)]
    engine = started(servers, tmp_path, outage_timeout=10.0)
    try:
        engine.submit(requests(4))
        until(lambda: server.tokens > 10)
        server.kill()
        until(lambda: engine.stats().extra["servers_live"] == 0)
        engine.publish(update(False, 1))
        server.restarted()
        finished(engine, 4)
    finally:
        engine.close()


def test_the_least_loaded_server_gets_the_next_request(tmp_path):
    servers = [StubServer(lora=True, step=0.02) for _ in range(3)]
    engine = started(servers, tmp_path)
    try:
        engine.submit(requests(6, rollouts=2))
        until(lambda: all(len(server.bodies) == 2 for server in servers))
        finished(engine, 6)
    finally:
        engine.close()


def test_no_more_is_handed_to_a_server_than_it_decodes_and_half_as_much_again(tmp_path):
    server = StubServer(lora=True, max_num_seqs=8)
    engine = started([server], tmp_path)
    try:
        server.post("/pause", {"mode": ["keep"]}, {})
        engine.submit(requests(10, rollouts=4))
        until(lambda: len(server.bodies) == 3)
        assert engine.stats().active_rollouts == 12 and engine.stats().waiting_requests == 7
        server.post("/resume", {}, {})
        finished(engine, 10)
    finally:
        engine.close()
