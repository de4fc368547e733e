"""Versions per token when weights change in flight, on stub servers whose log-probs say what they sampled from."""

import pytest

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import finished, requests, started, until, update
from trl_a3po.engines.vllm import pool


def servers_of(count, **settings):
    return [StubServer(**settings) for _ in range(count)]


@pytest.mark.parametrize("kv_on_publish", ["keep", "recompute"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_every_token_carries_the_version_it_was_sampled_from(tmp_path, lora, kv_on_publish):
    servers = servers_of(2, lora=lora, step=0.01)
    engine = started(servers, tmp_path, kv_on_publish=kv_on_publish)
    try:
        engine.submit(requests(6))
        for version, sampled in ((1, 20), (2, 60), (3, 100)):
            until(lambda sampled=sampled: sum(server.tokens for server in servers) > sampled)
            engine.publish(update(lora, version))
        events = finished(engine, 6)
        spans = {tuple(sorted(set(r.versions))) for event in events.values() for r in event.rollouts}
        spanning = any(len(span) > 1 for span in spans)
        assert spanning == (not lora or kv_on_publish == "recompute")
        assert all(r.versions == sorted(r.versions) for event in events.values() for r in event.rollouts)
        assert engine.stats().extra["bounded_tokens"] == 0
    finally:
        engine.close()


def test_tokens_still_on_their_way_when_a_server_pauses_are_waited_for(tmp_path):
    (server,) = servers = servers_of(1, step=0.01, lag=0.05)
    engine = started(servers, tmp_path)
    try:
        engine.submit(requests(2))
        until(lambda: server.tokens > 30)
        engine.publish(update(False, 1))
        finished(engine, 2)
        assert engine.stats().extra["bounded_tokens"] == 0
    finally:
        engine.close()


def test_a_publish_waits_for_no_tokens_when_no_call_is_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "SETTLE_TIMEOUT", 1e6)
    (server,) = servers = servers_of(1)
    engine = started(servers, tmp_path)
    try:
        engine.publish(update(False, 1))
        server.tokens += 2  # of another client
        engine.publish(update(False, 2))
        assert server.weight == 2.0
    finally:
        engine.close()


def test_where_the_boundary_is_not_known_the_older_version_is_stamped_and_counted(tmp_path):
    (server,) = servers = servers_of(1, step=0.03)
    engine = started(servers, tmp_path)
    try:
        engine.submit(requests(1))
        until(lambda: server.tokens > 8)
        server.tokens += 5  # of another client
        engine.publish(update(False, 1))
        until(lambda: engine.stats().extra["bounded_tokens"] > 0)
        until(lambda: engine.wait(0.1) != [])
        assert 1 <= engine.stats().extra["bounded_tokens"] <= 4
    finally:
        engine.close()


def test_recompute_goes_on_from_the_tokens_so_far(tmp_path):
    (server,) = servers = servers_of(1, step=0.02)
    engine = started(servers, tmp_path, kv_on_publish="recompute")
    try:
        engine.submit(requests(1, rollouts=1))
        until(lambda: server.tokens > 3)
        engine.publish(update(False, 1))
        (event,) = finished(engine, 1).values()
        first, second = server.bodies
        before = [v for v in event.rollouts[0].versions if v == 0]
        assert second["prompt"] == [*first["prompt"], *event.rollouts[0].token_ids[: len(before)]]
        assert second["max_tokens"] == first["max_tokens"] - len(before)
        assert second["cache_salt"] != first["cache_salt"]
    finally:
        engine.close()


def test_the_prefix_cache_of_one_publish_serves_no_other(tmp_path):
    (server,) = servers = servers_of(1)
    engine = started(servers, tmp_path)
    try:
        for weight in (0.5, 0.0):  # published again under the same version
            engine.submit(requests(1, first=int(weight * 2)))
            until(lambda: engine.wait(0.1) != [])
            engine.publish(update(False, 0, weight=weight))
        assert len({body["cache_salt"] for body in server.bodies}) == 2
    finally:
        engine.close()


def test_adapters_older_than_what_is_kept_are_unloaded_everywhere(tmp_path):
    servers = servers_of(2, lora=True)
    engine = started(servers, tmp_path, kept_versions=3)
    try:
        for version in range(1, 7):
            engine.publish(update(True, version))
        for server in servers:
            assert sorted(server.adapters.values()) == [4.0, 5.0, 6.0]
        assert len(list(tmp_path.glob("engine-*/policy-*"))) == 3
    finally:
        engine.close()
    assert all(not server.adapters for server in servers)
    assert not list(tmp_path.glob("engine-*"))
