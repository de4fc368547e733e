"""Rollouts on vLLM's core: which of them are decoded, their tokens with versions, and what a publish does to them.

Guarantees:

- a request ends in one event, unless it is cancelled; a rollout's three lists grow together;
- as many rollouts as there are slots are decoded at a time, in the order of their requests. The others wait here and
  not in vLLM, so that each begins under the weights of the time when it begins;
- a prefix cached under one publish serves no rollout that begins under another, and neither does what the vision tower
  made of an image. A rollout that has no token yet when weights are published begins anew under them. With caches that
  are kept, the later turns of an episode go on with the prefixes of the publish under which its first turn was
  sampled, which hold its own keys and values;
- a score is computed between the steps of rollouts, which go on meanwhile. A slot is kept free for it.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trl_a3po.engines.requests import check_request, check_scored
from trl_a3po.engines.vllm.noise import noise_seed
from trl_a3po.engines.vllm.process.vllm_core import Output
from trl_a3po.protocol.engine import EngineEvent, GroupFailed, GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.images import PromptImages
from trl_a3po.protocol.records import Rollout


class Core(Protocol):
    """`VLLMCore`, as far as a decoder uses it."""

    version: int

    @property
    def idle(self) -> bool: ...

    def features(self, token_ids: Sequence[int], images: PromptImages | None) -> list[Any]: ...

    def add(
        self, key: str, token_ids: Sequence[int], params: Any, salt: str, features: Sequence[Any] = ()
    ) -> None: ...

    def abort(self, keys: Sequence[str]) -> None: ...

    def step(self) -> list[Output]: ...

    def recompute(self) -> None: ...

    def forget_images(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Group:
    request: GroupRequest
    sampling: SamplingSettings
    unfinished: int
    features: list[Any]  # of its images, as `Core` makes them
    rollouts: "list[_Rollout]" = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Rollout:
    group: _Group
    number: int
    salt: str = ""
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"

    @property
    def episode(self) -> int | None:
        return self.group.request.episode_of(self.number)


class VLLMDecoder:
    """
    Args:
        core: vLLM's core; it holds weights of `version` and decodes at least one sequence more than `slots`.
        params: makes vLLM's form of the sampling settings, as `vllm_core.sampling_params` does.
        slots: rollouts decoded at a time.
        context: tokens of a sequence.
        max_prompt_tokens: longest prompt accepted.
        recompute: caches are computed anew when weights change.
        seeds: every rollout has noise of its own.
    """

    def __init__(
        self,
        core: Core,
        sampling: SamplingSettings,
        params: Any,
        *,
        version: int,
        slots: int,
        context: int,
        max_prompt_tokens: int,
        vocab_size: int,
        recompute: bool,
        seeds: bool,
    ):
        self._core = core
        self._sampling = sampling
        self._params = params
        self._shared_params = params(sampling)
        self._slots = slots
        self._context = context
        self._max_prompt_tokens = max_prompt_tokens
        self._vocab_size = vocab_size
        self._recompute = recompute
        self._seeds = seeds
        self._publishes = 0
        self._salts: dict[int, str] = {}  # of the prefixes of episodes of which a turn was sampled
        self._keys = itertools.count()
        self._groups: dict[int, _Group] = {}
        self._waiting: deque[_Rollout] = deque()
        self._later_turns: deque[_Rollout] = deque()
        self._running: dict[str, _Rollout] = {}
        self._events: list[EngineEvent] = []
        self.tokens = 0
        self.turns_prefilled_again = 0  # vLLM knows it and does not say
        core.version = version

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def idle(self) -> bool:
        return self._core.idle and not self._waiting and not self._later_turns and not self._events

    @property
    def active_rollouts(self) -> int:
        return len(self._running)

    @property
    def waiting_requests(self) -> int:
        waiting = {id(rollout.group) for rollout in (*self._later_turns, *self._waiting)}
        return len(waiting - {id(rollout.group) for rollout in self._running.values()})

    def submit(self, request: GroupRequest) -> None:
        """Raises `ValueError` for a prompt that does not fit, or does not show its images as vLLM expects."""
        if request.request_id in self._groups:
            raise ValueError(
                f"Request {request.request_id} is already being sampled: every attempt needs a new request_id."
            )
        check_request(
            request,
            self._sampling,
            vocab_size=self._vocab_size,
            max_prompt_tokens=self._max_prompt_tokens,
            room=f" in vLLM's context of {self._context} tokens",
        )
        features = self._core.features(request.prompt_ids, request.images)
        group = _Group(request, request.settings(self._sampling), request.num_rollouts, features)
        self._groups[request.request_id] = group
        group.rollouts = [_Rollout(group, request.first_rollout + n) for n in range(request.num_rollouts)]
        if request.first_position:  # a later turn goes before prompts that have not begun, behind other such turns
            self._later_turns.extend(group.rollouts)
        else:
            self._waiting.extend(group.rollouts)

    def cancel(self, request_ids: Iterable[int]) -> None:
        cancelled = {id(group) for request_id in request_ids if (group := self._groups.pop(request_id, None))}
        self._drop(cancelled)

    def end_episodes(self, episodes: Iterable[int]) -> None:
        for episode in episodes:
            self._salts.pop(episode, None)

    def step(self) -> list[EngineEvent]:
        self._begin_waiting()
        for output in self._core.step():
            self._record(output)
        events, self._events = self._events, []
        return events

    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """Raises `ValueError` for tokens that do not fit."""
        check_scored(prompt_ids, completion_ids, vocab_size=self._vocab_size, context=self._context - 1)
        key = f"score-{next(self._keys)}"
        self._core.add(key, [*prompt_ids, *completion_ids], self._params(self._sampling, score=True), key)
        scores: list[float] = []
        while not scores:
            self._begin_waiting()
            for output in self._core.step():
                if output.key != key:
                    self._record(output)
                elif output.prompt_logps is not None:
                    scores = output.prompt_logps
        return scores[-len(completion_ids) :]

    def set_version(self, version: int) -> None:
        if version <= self._core.version:
            self._salts.clear()
        self._core.version = version
        self._publishes += 1
        if self._recompute:
            self._core.recompute()
        begun_anew = {key: rollout for key, rollout in self._running.items() if not rollout.token_ids}
        self._core.abort(list(begun_anew))
        self._core.forget_images()  # all others have read theirs, or begin with them again
        for key, rollout in begun_anew.items():
            del self._running[key]
            self._begin(rollout)

    def _begin_waiting(self) -> None:
        while (self._waiting or self._later_turns) and len(self._running) < self._slots:
            self._begin((self._later_turns or self._waiting).popleft())

    def _begin(self, rollout: _Rollout) -> None:
        request, sampling = rollout.group.request, rollout.group.sampling
        if self._seeds:
            seed = noise_seed(sampling.seed, request.noise_key, rollout.number, request.first_position)
            params = self._params(sampling, seed=seed)
        else:
            params = self._shared_params if sampling is self._sampling else self._params(sampling)
        key = str(next(self._keys))
        self._running[key] = rollout
        rollout.salt = str(self._publishes)
        if rollout.episode is not None:
            rollout.salt = self._salts.get(rollout.episode, rollout.salt)
        self._core.add(key, request.prompt_ids, params, rollout.salt, rollout.group.features)

    def _record(self, output: Output) -> None:
        rollout = self._running.get(output.key)
        if rollout is None:  # it was cancelled while its batch was under way
            return
        rollout.token_ids += output.token_ids
        rollout.logps += output.logps
        rollout.versions += [output.version] * len(output.token_ids)
        self.tokens += len(output.token_ids)
        if output.finish is not None:
            del self._running[output.key]
            self._ended(rollout, output.finish)

    def _ended(self, rollout: _Rollout, finish: str) -> None:
        group, length = rollout.group, len(rollout.token_ids)
        if finish == "stop":
            rollout.finish = "stop"
        elif finish != "length" or length < group.sampling.max_new_tokens:
            self._fail(group, f"vLLM ended a completion after {length} tokens, by {finish!r}.")
            return
        if rollout.episode is not None and not self._recompute:
            self._salts[rollout.episode] = rollout.salt
        group.unfinished -= 1
        if group.unfinished == 0:
            try:
                rollouts = [Rollout(r.token_ids, r.logps, r.versions, r.finish) for r in group.rollouts]
            except ValueError as error:
                self._fail(group, str(error))
                return
            del self._groups[group.request.request_id]
            self._events.append(GroupFinished(group.request.request_id, rollouts))

    def _fail(self, group: _Group, reason: str) -> None:
        del self._groups[group.request.request_id]
        self._drop({id(group)})
        self._events.append(GroupFailed(group.request.request_id, reason))

    def _drop(self, groups: set[int]) -> None:
        """Stop working on the rollouts of these groups."""
        keys = [key for key, rollout in self._running.items() if id(rollout.group) in groups]
        self._core.abort(keys)
        for key in keys:
            del self._running[key]
        self._waiting = deque(rollout for rollout in self._waiting if id(rollout.group) not in groups)
        self._later_turns = deque(rollout for rollout in self._later_turns if id(rollout.group) not in groups)
