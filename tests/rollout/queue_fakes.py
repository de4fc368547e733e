"""A fake engine for the queue's tests: samples nothing, but stamps, delays, fails and dies like a real one."""

import random
import threading
import time
from itertools import count, islice

from trl_a3po.protocol.engine import EngineStats, GroupFailed, GroupFinished
from trl_a3po.protocol.records import Rollout, Score
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.rollout.left_out import LeftOut
from trl_a3po.rollout.prompt_stream import PromptStream, TokenizedPrompt


def make_rollout(versions):
    return Rollout(
        token_ids=[1] * len(versions), logps=[-1.0 if v >= 0 else 0.0 for v in versions], versions=list(versions)
    )


def make_prompts(number=None, tokenize=lambda row: [1, row["number"]], **options):
    """A stream of `number` prompts, or one without an end."""

    def prompt(row):
        made = tokenize(row)
        return made if isinstance(made, LeftOut) else TokenizedPrompt(made)

    return PromptStream(({"number": n} for n in (count() if number is None else range(number))), prompt, **options)


def zero_score(group):
    return Score(rewards=[[0.0] for _ in group.rollouts])


def update(version):
    return WeightUpdate(version=version, tensors={}, complete=False)


class FakeEngine:
    """Groups finish after a random delay, with versions from the one published when they began to the current one.

    `delay(request)` in seconds; `fails(request)` -> a reason or `None`; `dies` is the chance that a `wait` loses every
    outstanding request. `error`, once set, is what `wait` raises; `hangs`, once set, makes `wait` hang until `close`.
    """

    def __init__(self, *, delay=lambda request: 0.0, fails=lambda request: None, dies=0.0, seed=0, version=0):
        self.delay, self.fails, self.dies = delay, fails, dies
        self.version = version
        self.error = None
        self.hangs = threading.Event()
        self.hanging = threading.Event()
        self.released = threading.Event()
        self.submitted = []  # (request, version published when it arrived), in order
        self.cancelled = []
        self._random = random.Random(seed)
        self._lock = threading.Condition()
        self._outstanding = {}  # request_id -> (request, time it is done, version it began with)

    def start(self, spec, sampling, update):
        self.version = update.version

    def submit(self, requests):
        with self._lock:
            for request in requests:
                self.submitted.append((request, self.version))
                self._outstanding[request.request_id] = (request, time.monotonic() + self.delay(request), self.version)

    def wait(self, timeout):
        if self.hangs.is_set():
            self.hanging.set()
            self.released.wait()
        if self.error is not None:
            raise self.error
        deadline = time.monotonic() + timeout
        while not (events := self._events()) and time.monotonic() < deadline:
            time.sleep(0.0002)
        return events

    def _events(self):
        with self._lock:
            now = time.monotonic()
            if self._outstanding and self._random.random() < self.dies:
                lost = [GroupFailed(request_id, "the worker died") for request_id in self._outstanding]
                self._outstanding.clear()
                return lost
            done = [item for item in self._outstanding.values() if item[1] <= now]
            self._random.shuffle(done)
            return [self._end(*islice(item, 0, 3, 2)) for item in done]

    def _end(self, request, began):
        del self._outstanding[request.request_id]
        if (reason := self.fails(request)) is not None:
            return GroupFailed(request.request_id, reason)
        draws = [
            sorted(self._random.randint(began, self.version) for _ in range(3)) for _ in range(request.num_rollouts)
        ]
        return GroupFinished(request.request_id, [make_rollout(versions) for versions in draws])

    def cancel(self, request_ids):
        with self._lock:
            self.cancelled += request_ids
            for request_id in request_ids:
                self._outstanding.pop(request_id, None)

    def publish(self, update):
        with self._lock:
            self.version = update.version

    def stats(self):
        return EngineStats(waiting_requests=len(self._outstanding))

    def close(self):
        self.released.set()
