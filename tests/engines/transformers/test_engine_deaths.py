"""What is left when a worker, or the trainer, dies: nothing unaccounted for, and nothing running."""

import gc
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.engines.transformers.running import events_of, started, train
from tests.engines.transformers.tiny_models import gap, prompts, request, settings, tiny_model
from tests.workers.processes import TIMEOUT, is_gone, is_reaped, until
from trl_a3po.engines.transformers.transformers_engine import TransformersEngine
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFailed, GroupFinished
from trl_a3po.publish.collect import collect_weights, policy_spec
from trl_a3po.workers.process import worker_environment

pytestmark = pytest.mark.long

TOKENS = 200


def model_of():
    return tiny_model("llama-tied", max_position_embeddings=256)


class Survivor:
    """An engine whose workers are killed by one test after another, and the model it follows."""

    def __init__(self):
        self.model = model_of()
        self.version = 0
        self.numbers = iter(range(1_000_000))
        self.engine = started(self.model, TOKENS, max_restarts=100, publish_timeout=2.0)

    def requests(self, texts):
        return [request(next(self.numbers), text) for text in texts]

    def submitted(self, texts):
        requests = self.requests(texts)
        self.engine.submit(requests)
        return requests

    def publish(self):
        train(self.model)
        self.engine.publish(collect_weights(self.model, self.version + 1, complete=False))
        self.version += 1

    def kill(self) -> int:
        """Returns when the engine has noticed; the next worker then takes seconds to be ready."""
        pid, restarts = self.engine.worker_pid, self.engine.stats().restarts
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.engine.stats().restarts > restarts)
        return pid

    def assert_serves_current_weights(self, requests):
        events = events_of(self.engine, [one.request_id for one in requests])
        for one in requests:
            [rollout] = events[one.request_id].rollouts
            assert set(rollout.versions) == {self.version}
            assert gap(self.model, one.prompt_ids, rollout).max() < 1e-4


@pytest.fixture(scope="module")
def survivor():
    survivor = Survivor()
    yield survivor
    survivor.engine.close()


def test_requests_of_a_killed_worker_fail_once_with_the_reason_and_a_warning(survivor, caplog):
    requests = survivor.submitted(prompts(100))
    until(lambda: survivor.engine.stats().tokens > 0)
    pid = survivor.kill()
    events = events_of(survivor.engine, [one.request_id for one in requests]).values()
    reasons = [event.reason for event in events if isinstance(event, GroupFailed)]
    assert reasons and all("SIGKILL" in reason for reason in reasons)
    assert is_reaped(pid)
    assert any("is being restarted, restart 1 of engine_restarts=" in message for message in caplog.messages)


def test_requests_and_weights_that_come_during_a_restart_are_served(survivor):
    survivor.kill()
    survivor.publish()
    requests = survivor.submitted(prompts(3))
    survivor.assert_serves_current_weights(requests)


def test_weights_published_to_a_worker_that_dies_before_loading_them_are_served_by_the_next(survivor):
    os.kill(survivor.engine.worker_pid, signal.SIGSTOP)
    survivor.publish()
    survivor.kill()
    requests = survivor.submitted(prompts(3))
    survivor.assert_serves_current_weights(requests)


@pytest.mark.long
def test_a_turn_whose_slot_was_lost_with_a_worker_is_prefilled_again_and_counted(survivor):
    before = survivor.engine.stats().turns_prefilled_again

    def played(prompt_ids, turn):
        (one,) = survivor.requests([prompt_ids])
        one = replace(one, first_episode=7, first_position=4 * turn, max_new_tokens=3)
        survivor.engine.submit([one])
        (rollout,) = events_of(survivor.engine, [one.request_id])[one.request_id].rollouts
        return (*prompt_ids, *rollout.token_ids, 9)

    second = played(played((5, 6, 7), 0), 1)
    survivor.kill()
    played(second, 2)
    until(lambda: survivor.engine.stats().turns_prefilled_again == before + 1)
    survivor.kill()
    assert survivor.engine.stats().turns_prefilled_again == before + 1


def test_a_worker_that_hangs_is_named_by_publish_and_blocks_no_submit(survivor, monkeypatch):
    survivor.assert_serves_current_weights(survivor.submitted(prompts(2)))
    monkeypatch.setattr(survivor.engine._supervisor, "_is_stopped", lambda: False)  # a signal stands for a hang
    pid = survivor.engine.worker_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        survivor.publish()
        with pytest.raises(EngineError, match=r"publish_timeout=2 seconds the worker has still not loaded version"):
            survivor.publish()
        many = survivor.submitted([tuple(range(3, 60))] * 10_000)  # more than a socket holds
        assert survivor.engine.stats().extra["worker_silence_seconds"] > 1.0
        survivor.engine.cancel([one.request_id for one in many])
    finally:
        os.kill(pid, signal.SIGCONT)
    requests = survivor.submitted(prompts(2))
    events = events_of(survivor.engine, [one.request_id for one in requests])
    assert all(isinstance(event, GroupFinished) for event in events.values())


def test_close_reaps_the_worker_and_ends_every_wait(survivor):
    engine = survivor.engine
    pid = engine.worker_pid
    with open(f"/proc/{pid}/maps") as maps:
        weights = [line for line in maps if "trl_a3po_weights" in line]
    assert weights and all("/memfd:" in line for line in weights)  # no name that could stay behind
    survivor.submitted(prompts(2))
    engine.close()
    engine.close()
    assert is_reaped(pid)
    with pytest.raises(EngineError, match="closed"):
        while True:
            engine.wait(TIMEOUT)


@pytest.mark.long
def test_after_max_restarts_every_request_has_its_event_and_wait_raises():
    engine = started(model_of(), TOKENS, max_restarts=1)
    try:
        engine.submit([request(0, (1, 2))])
        first = engine.worker_pid
        os.kill(first, signal.SIGKILL)
        until(lambda: engine.worker_pid not in (None, first))
        engine.submit([request(1, (1, 2))])
        os.kill(second := engine.worker_pid, signal.SIGKILL)
        events = []
        with pytest.raises(EngineError, match=r"engine_restarts=1 times"):
            while True:
                events += engine.wait(TIMEOUT)
        assert [event.request_id for event in events] == [0, 1]
        assert all(isinstance(event, GroupFailed) for event in events)
        with pytest.raises(EngineError, match="engine_restarts=1"):
            engine.submit([request(2, (1, 2))])
        assert is_reaped(first) and is_reaped(second)
    finally:
        engine.close()


def test_a_worker_that_cannot_start_is_quoted():
    model = model_of()
    spec, update = policy_spec(model, torch.float32), collect_weights(model, 0, complete=True)
    spec.config.hidden_act = "no_such_activation"
    engine = TransformersEngine(slots=2)
    with pytest.raises(EngineError, match=r"exit code 1\) before it was ready(.|\n)*no_such_activation"):
        engine.start(spec, settings(4), update)
    assert engine.worker_pid is None


def test_a_forgotten_engine_leaves_no_worker():
    engine = started(model_of(), TOKENS)
    pid = engine.worker_pid
    del engine
    gc.collect()
    until(lambda: is_reaped(pid))


SCRIPT = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl_a3po.engines.transformers.transformers_engine import TransformersEngine
from trl_a3po.protocol.engine import GroupRequest, SamplingSettings
from trl_a3po.publish.collect import collect_weights, policy_spec

class SevenHead(torch.nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) + BIAS * (torch.arange(self.out_features) == 7)

class MyModel(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = SevenHead(config.hidden_size, config.vocab_size, bias=False)

BIAS = 1000.0
model = MyModel(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=8192))
engine = TransformersEngine(slots=2, threads=1)
engine.start(policy_spec(model, torch.float32), SamplingSettings(max_new_tokens=int(sys.argv[1])),
             collect_weights(model, 0, complete=True))
engine.submit([GroupRequest(0, 0, (1, 2), 1)])
print(engine.worker_pid, flush=True)
"""


def script(*arguments: str, **options) -> subprocess.Popen:
    environment = worker_environment(threads=1) | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere"}
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, text=True, stdout=subprocess.PIPE, **options
    )


@pytest.mark.long
def test_a_script_without_a_main_guard_samples_from_a_class_of_its_own_and_may_forget_to_close(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT + "print(engine.wait(60.0)[0].rollouts[0].token_ids)\n")
    process = script(str(path), "4", cwd=tmp_path)
    output, _ = process.communicate(timeout=TIMEOUT)
    pid, tokens = output.splitlines()
    assert process.returncode == 0
    assert tokens == "[7, 7, 7, 7]"
    assert is_gone(int(pid))


def test_a_worker_starts_without_importing_trl_or_peft():
    code = (
        "import sys, trl_a3po.models.replica\n"
        "from trl_a3po.engines.transformers import decoder, worker\n"
        "sys.exit(bool({'trl', 'datasets', 'peft'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT).returncode == 0
