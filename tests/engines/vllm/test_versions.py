"""Versions per token when weights change in flight, on stub servers whose log-probs say what they sampled from."""

from dataclasses import replace

import pytest

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import finished, requests, started, until, update
from trl_a3po.engines.vllm.servers.rollout_jobs import Job, JobQueue, PartialGroup
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupRequest, SamplingSettings


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
    finally:
        engine.close()


def test_rollouts_that_ended_before_a_publish_and_those_that_had_not_begun_are_told_apart(tmp_path):
    """Some sequences of a call are finished when weights change, some are under way; another call waits its turn."""
    (server,) = servers = servers_of(1, step=0.02)
    engine = started(servers, tmp_path)
    try:
        engine.submit(requests(3, rollouts=4))
        for version in (1, 2, 3):
            sampled = server.tokens
            until(lambda sampled=sampled: server.tokens > sampled + 30)
            engine.publish(update(False, version))
        events = finished(engine, 3)
        lengths = {r.versions[-1] for event in events.values() for r in event.rollouts}
        assert len(lengths) > 1
    finally:
        engine.close()


def test_a_server_without_the_extension_is_refused_for_kept_caches_alone(tmp_path):
    servers = servers_of(1, counts_tokens=False)
    with pytest.raises(EngineError, match=r"a3po_server.py .*'recompute'.*\n.*\n.*--middleware a3po_server"):
        started(servers, tmp_path)
    started(servers, tmp_path, kv_on_publish="recompute").close()


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


@pytest.mark.parametrize("kv_on_publish", ["keep", "recompute"])
def test_an_episode_goes_on_at_its_server_and_keeps_its_cache_across_publishes_if_caches_are_kept(
    tmp_path, kv_on_publish
):
    servers = servers_of(2)
    engine = started(servers, tmp_path, kv_on_publish=kv_on_publish)
    first = GroupRequest(0, 0, (5, 6), 1, first_episode=0)
    later = GroupRequest(1, 0, (5, 6, 7, 8), 1, first_position=1, first_episode=0)

    def asked(request):
        """The server that sampled it, and the salt."""
        before = [len(server.bodies) for server in servers]
        engine.submit([request])
        finished(engine, 1)
        [found] = [
            (place, body["cache_salt"])
            for place, server in enumerate(servers)
            for body in server.bodies[before[place] :]
        ]
        return found

    try:
        home, old = asked(first)
        engine.publish(update(False, 1))
        place, kept = asked(later)
        _, new = asked(replace(first, request_id=2, first_episode=2))
        engine.end_episodes([0])
        _, over = asked(replace(later, request_id=3))
        assert place == home and old != new == over
        assert kept == (old if kv_on_publish == "keep" else new)
    finally:
        engine.close()


def test_later_turns_wait_in_the_order_in_which_they_came_and_before_prompts():
    queue = JobQueue()
    positions = {0: 0, 1: 3, 2: 0, 3: 5, 4: 1}
    for number, position in positions.items():
        group = PartialGroup.of(GroupRequest(number, 0, (5,), 1, first_position=position), SamplingSettings(8))
        queue.append(Job(group, group.sequences))
    assert [job.group.request.request_id for job in queue.due()] == [1, 3, 4, 0, 2]


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
