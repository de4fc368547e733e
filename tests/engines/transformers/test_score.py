"""Log-probs of known tokens from a running engine: those of a clean forward under the weights published last."""

import os
import signal
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.engines.transformers.running import events_of, started, train
from tests.engines.transformers.tiny_models import gap, prompts, request, tiny_model
from tests.workers.processes import TIMEOUT
from trl_a3po.errors import EngineError
from trl_a3po.publish.collect import collect_weights
from trl_a3po.testing import completion_logps

PROMPT, COMPLETION = [5, 9, 12, 30], [7, 40, 3, 22, 8]


class Scored:
    def __init__(self, model):
        self.model = model
        self.version = 0
        self.engine = started(model, 40, max_restarts=100)

    def step(self):
        train(self.model)
        self.version += 1
        self.engine.publish(collect_weights(self.model, self.version, complete=False))

    def assert_scores_right(self):
        logps, version = self.engine.score(PROMPT, COMPLETION, TIMEOUT)
        assert version == self.version
        expected = completion_logps(self.model, PROMPT, COMPLETION, 1.0)
        torch.testing.assert_close(torch.tensor(logps), expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module", params=["full", pytest.param("lora", marks=pytest.mark.long)])
def scored(request):
    model = tiny_model("llama-tied")
    if request.param == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).eval()
    scored = Scored(model)
    yield scored
    scored.engine.close()


def test_scores_follow_every_publish(scored):
    scored.assert_scores_right()
    for _ in range(3):
        scored.step()
        scored.assert_scores_right()


def test_rollouts_in_flight_go_on_while_another_thread_waits_for_them(scored):
    requests = [request(number, text, 2) for number, text in enumerate(prompts(20))]
    scored.engine.submit(requests)
    found = {}
    thread = threading.Thread(target=lambda: found.update(events_of(scored.engine, [r.request_id for r in requests])))
    thread.start()
    while thread.is_alive():
        scored.assert_scores_right()
    thread.join()
    for one in requests:
        for rollout in found[one.request_id].rollouts:
            assert gap(scored.model, one.prompt_ids, rollout).max() < 1e-4


@pytest.mark.parametrize(
    "prompt, completion, message",
    [
        ([], COMPLETION, "at least one prompt and one completion token"),
        (PROMPT, [], "at least one prompt and one completion token"),
        (PROMPT, [3, 64], "Token ids from 3 to 64 cannot be scored: the model's vocabulary is 0 to 63"),
        (PROMPT, [3] * 93, "97 tokens cannot be scored: the model's context is 96"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_nothing_else_suffers(scored, prompt, completion, message):
    with pytest.raises(ValueError, match=message):
        scored.engine.score(prompt, completion, TIMEOUT)
    scored.assert_scores_right()


def test_a_killed_worker_is_asked_again_after_it_was_replaced(scored):
    pid = scored.engine.worker_pid
    os.kill(pid, signal.SIGSTOP)  # it hears the question and dies over it
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    scored.assert_scores_right()
    assert scored.engine.worker_pid != pid


def test_a_worker_that_does_not_answer_is_reported_in_time(scored):
    pid = scored.engine.worker_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match=r"has not scored 5 known tokens within 0.3 seconds"):
            scored.engine.score(PROMPT, COMPLETION, 0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
    scored.assert_scores_right()
