"""Helpers for tests of training code: an engine without a process, and scripted completions.

`StubEngine` samples nothing: completions come from a function, log-probs from its own replica of the published policy,
all at once, in `submit`. A run with it is exact and quick, so a test can hold a trainer against a formula.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence

import torch

from trl_a3po.models.replica import build_replica, load_update
from trl_a3po.protocol.engine import EngineEvent, EngineStats, GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.records import Rollout
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate

Completion = Callable[[Sequence[int], int], list[int]]


def scripted_completion(vocab_size: int, max_new_tokens: int, first_token: int = 3) -> Completion:
    """`(prompt_ids, rollout number) -> token ids`: arbitrary, of length 1 to `max_new_tokens`, always the same."""

    def complete(prompt_ids: Sequence[int], rollout: int) -> list[int]:
        noise = random.Random(repr((list(prompt_ids), rollout)))
        return [noise.randrange(first_token, vocab_size) for _ in range(noise.randint(1, max_new_tokens))]

    return complete


class StubEngine:
    """An engine (`trl_a3po.protocol.engine.Engine`) in the calling process.

    Args:
        complete: `(prompt_ids, rollout number) -> token ids` of the completion.
    """

    def __init__(self, complete: Completion):
        self.complete = complete
        self.version: int | None = None
        self.published: list[int] = []
        self.requests: list[GroupRequest] = []
        self.closed = False
        self._events: list[EngineEvent] = []
        self._lock = threading.RLock()  # publish comes from the main thread, submit from the queue's
        self._tokens = 0

    def start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        self._replica = build_replica(spec, torch.device("cpu"))
        self._sampling = sampling
        self.closed = False
        self.publish(update)

    def publish(self, update: WeightUpdate) -> None:
        with self._lock:
            load_update(self._replica, update)
            self.version = update.version
            self.published.append(update.version)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        with self._lock:
            self.requests.extend(requests)
            self._events.extend(GroupFinished(request.request_id, self._rollouts(request)) for request in requests)

    def wait(self, timeout: float) -> list[EngineEvent]:
        with self._lock:
            events, self._events = self._events, []
        if not events:
            time.sleep(min(timeout, 0.001))
        return events

    def cancel(self, request_ids: Sequence[int]) -> None:
        cancelled = set(request_ids)
        self._events = [event for event in self._events if event.request_id not in cancelled]

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        with self._lock:
            logps = completion_logps(self._replica, prompt_ids, completion_ids, self._sampling.temperature)
            return logps.tolist(), self.version

    def stats(self) -> EngineStats:
        return EngineStats(tokens=self._tokens)

    def close(self) -> None:
        self.closed = True

    def _rollouts(self, request: GroupRequest) -> list[Rollout]:
        rollouts = []
        for number in range(request.num_rollouts):
            token_ids = self.complete(request.prompt_ids, number)
            logps = completion_logps(self._replica, request.prompt_ids, token_ids, self._sampling.temperature)
            stops = token_ids[-1] in self._sampling.stop_token_ids
            reason = "stop" if stops else "length"
            rollouts.append(Rollout(token_ids, logps.tolist(), [self.version] * len(token_ids), reason))
            self._tokens += len(token_ids)
        return rollouts


@torch.no_grad()
def completion_logps(
    model: torch.nn.Module, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float
) -> torch.Tensor:
    """`(T,)` log-probs of the completion's tokens by one full forward, fp32."""
    device = next(model.parameters()).device
    input_ids = torch.tensor([[*prompt_ids, *token_ids]], device=device)
    logits = model(input_ids).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids, device=device)[:, None])[:, 0]
