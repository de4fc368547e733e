"""Helpers for tests of training code: an engine without a process, and scripted completions.

`StubEngine` samples nothing. Its completions come from a function, and their log-probs from its own replica of the
published policy; both are computed in `submit`. A run with it is exact and fast, so a test can hold a trainer
against a formula.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence

import torch

from trl_a3po.engines.usage import NOT_STARTED, check_start, check_version_order
from trl_a3po.errors import EngineError
from trl_a3po.models.replica import build_replica, load_update
from trl_a3po.protocol.engine import EngineEvent, EngineStats, GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.images import PromptImages
from trl_a3po.protocol.records import Rollout
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate

Completion = Callable[[Sequence[int], int], list[int]]


def scripted_completion(vocab_size: int, max_new_tokens: int, first_token: int = 3) -> Completion:
    """A function `(prompt_ids, rollout number) -> token ids`. The tokens are arbitrary but always the same, 1 to
    `max_new_tokens` of them, with ids from `first_token` to `vocab_size - 1`."""

    def complete(prompt_ids: Sequence[int], rollout: int) -> list[int]:
        noise = random.Random(repr((list(prompt_ids), rollout)))
        return [noise.randrange(first_token, vocab_size) for _ in range(noise.randint(1, max_new_tokens))]

    return complete


class StubEngine:
    """An engine (`trl_a3po.protocol.engine.Engine`) in the calling process.

    Args:
        complete: `(prompt_ids, rollout number) -> token ids` of the completion. It is cut off at the request's
            `max_new_tokens`, and behind a `stop_token_ids` of the request.
    """

    def __init__(self, complete: Completion) -> None:
        self.complete = complete
        self.version: int | None = None
        self.published: list[int] = []
        self.requests: list[GroupRequest] = []
        self.closed = False
        self._replica: torch.nn.Module | None = None
        self._sampling: SamplingSettings | None = None
        self._events: list[EngineEvent] = []
        self._lock = threading.RLock()  # publish comes from the main thread, submit from the queue's
        self._tokens = 0

    def start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        check_start(update, used=False)  # a stub may be started again, for another run
        self._replica = build_replica(spec, torch.device("cpu"))
        self._sampling = sampling
        self.version = None
        self.closed = False
        self.publish(update)

    def publish(self, update: WeightUpdate) -> None:
        replica, _ = self._started()
        if self.version is not None:
            check_version_order(update, self.version)
        with self._lock:
            load_update(replica, update)
            self.version = update.version
            self.published.append(update.version)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self._started()
        with self._lock:
            self.requests.extend(requests)
            self._events.extend(GroupFinished(request.request_id, self._rollouts(request)) for request in requests)

    def wait(self, timeout: float) -> list[EngineEvent]:
        self._started()
        with self._lock:
            events, self._events = self._events, []
        if not events:
            time.sleep(min(timeout, 0.001))
        return events

    def cancel(self, request_ids: Sequence[int]) -> None:
        self._started()
        cancelled = set(request_ids)
        with self._lock:
            self._events = [event for event in self._events if event.request_id not in cancelled]

    def end_episodes(self, episodes: Sequence[int]) -> None:
        """A stub keeps nothing for later turns."""

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        replica, sampling = self._started()
        if not prompt_ids or not completion_ids:
            raise ValueError("There are no tokens to score.")
        with self._lock:
            logps = completion_logps(replica, prompt_ids, completion_ids, sampling.temperature)
            return logps.tolist(), self._version()

    def stats(self) -> EngineStats:
        return EngineStats(tokens=self._tokens)

    def close(self) -> None:
        self.closed = True

    def _started(self) -> tuple[torch.nn.Module, SamplingSettings]:
        if self._replica is None or self._sampling is None:
            raise EngineError(NOT_STARTED)
        return self._replica, self._sampling

    def _version(self) -> int:
        if self.version is None:
            raise EngineError(NOT_STARTED)
        return self.version

    def _rollouts(self, request: GroupRequest) -> list[Rollout]:
        replica, sampling = self._started()
        rollouts = []
        for number in range(request.first_rollout, request.first_rollout + request.num_rollouts):
            token_ids = _cut(self.complete(request.prompt_ids, number), request)
            logps = completion_logps(replica, request.prompt_ids, token_ids, sampling.temperature, request.images)
            stops = token_ids[-1] in request.settings(sampling).stop_token_ids
            versions = [self._version()] * len(token_ids)
            rollouts.append(Rollout(token_ids, logps.tolist(), versions, "stop" if stops else "length"))
            self._tokens += len(token_ids)
        return rollouts


def _cut(token_ids: list[int], request: GroupRequest) -> list[int]:
    longest = len(token_ids) if request.max_new_tokens is None else request.max_new_tokens
    stops = (end for end, token in enumerate(token_ids, start=1) if token in request.stop_token_ids)
    return token_ids[: min(longest, next(stops, longest))]


@torch.no_grad()
def completion_logps(
    model: torch.nn.Module,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    temperature: float,
    images: PromptImages | None = None,
) -> torch.Tensor:
    """Log-probs `(T,)` of the completion's tokens in fp32, by one forward over the whole sequence."""
    device = next(model.parameters()).device
    input_ids = torch.tensor([[*prompt_ids, *token_ids]], device=device)
    fields = {} if images is None else images.over(input_ids.shape[1], device)
    logits: torch.Tensor = model(input_ids, **fields).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids, device=device)[:, None])[:, 0]
