"""deterministic=True: every call names the seed of its noise, and servers must not depend on what they batch."""

import pytest

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import finished, requests, started, until, update
from trl_a3po.engines.vllm.noise import noise_seed
from trl_a3po.errors import EngineError

INVARIANT = {"VLLM_BATCH_INVARIANT": True}


def seeds_of(server, tmp_path, asked, **settings) -> list:
    engine = started([server], tmp_path, **settings)
    try:
        engine.submit(asked)
        finished(engine, len(asked))
    finally:
        engine.close()
    return [body.get("seed") for body in server.bodies]


def test_without_it_no_seed_is_sent_which_vllm_pays_for_with_time(tmp_path):
    assert seeds_of(StubServer(lora=True), tmp_path, requests(2)) == [None, None]


def test_a_seed_is_decided_by_the_run_and_the_request(tmp_path):
    first = seeds_of(StubServer(lora=True, **INVARIANT), tmp_path, requests(3), deterministic=True)
    again = seeds_of(StubServer(lora=True, **INVARIANT), tmp_path, requests(3), deterministic=True)
    assert sorted(first) == sorted(again) and len(set(first)) == 3


def test_what_goes_on_after_a_publish_has_noise_of_its_own_for_each_rollout(tmp_path):
    server = StubServer(step=0.02, **INVARIANT)
    engine = started([server], tmp_path, kv_on_publish="recompute", deterministic=True)
    try:
        engine.submit(requests(1))
        until(lambda: server.tokens > 8)
        engine.publish(update(False, 1))
        finished(engine, 1)
    finally:
        engine.close()
    assert server.bodies[0]["n"] == 4 and all(body["n"] == 1 for body in server.bodies[1:])
    seeds = [body["seed"] for body in server.bodies]
    assert len(set(seeds)) == len(seeds) > 2
    assert set(seeds[1:]).isdisjoint(range(seeds[0], seeds[0] + 4))


def test_seeds_of_a_group_follow_one_another_and_fit_into_what_vllm_takes():
    seeds = [noise_seed(7, 1 << 40, rollout, 0) for rollout in range(4)]
    assert seeds == list(range(seeds[0], seeds[0] + 4)) and 0 <= seeds[0] < 2**63 - 4
    others = [noise_seed(8, 1 << 40, 0, 0), noise_seed(7, 1, 0, 0), noise_seed(7, 1 << 40, 0, 5)]
    assert len({seeds[0], *others}) == 4


@pytest.mark.parametrize("changes", [{}, {"device": "cpu", **INVARIANT}], ids=["unset", "on a CPU"])
def test_a_server_whose_results_depend_on_what_it_batches_is_refused(tmp_path, changes):
    with pytest.raises(EngineError, match="depends on what else it decodes") as error:
        started([StubServer(**changes)], tmp_path, deterministic=True)
    assert "VLLM_BATCH_INVARIANT=1 vllm serve" in str(error.value)
