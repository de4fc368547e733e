"""An `EpisodeRunner` and its parts, without a trainer: an engine that answers from a script, and a way to wait for
groups."""

import itertools
import threading
import time

from tests.episodes.chat import TOKENIZER, said
from tests.workers.processes import until
from trl_a3po.episodes.calls import Calls
from trl_a3po.episodes.environments import EnvironmentPool
from trl_a3po.episodes.runner import EpisodeRunner
from trl_a3po.episodes.templates import ChatTemplates
from trl_a3po.episodes.tools import ToolRollout
from trl_a3po.protocol.engine import EngineStats, GroupFailed, GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.records import Rollout

TIMEOUT = 60.0


class ScriptedEngine:
    """Says what `complete(prompt_ids, number)` says, one version newer for each publish. `fails(request)` is a reason
    or `None`."""

    def __init__(self, complete=lambda prompt_ids, number: said("yes"), fails=lambda request: None):
        self.complete, self.fails = complete, fails
        self.version = 0
        self.requests: list[GroupRequest] = []
        self.cancelled: list[int] = []
        self.ended: list[int] = []  # episodes
        self.held = threading.Event()  # while set, nothing is answered
        self._events: list = []
        self._threads: set[str] = set()

    def submit(self, requests):
        self._threads.add(threading.current_thread().name)
        for request in requests:
            assert request.row is None, "an engine is never sent a row"
            self.requests.append(request)
            reason = self.fails(request)
            if reason is not None:
                self._events.append(GroupFailed(request.request_id, reason))
                continue
            self._events.append(
                GroupFinished(request.request_id, [self._rollout(request, n) for n in numbers(request)])
            )

    def wait(self, timeout):
        self._threads.add(threading.current_thread().name)
        if self.held.is_set():
            time.sleep(min(timeout, 0.001))
            return []
        events, self._events = self._events, []
        return events

    def cancel(self, request_ids):
        self.cancelled += request_ids
        self._events = [event for event in self._events if event.request_id not in set(request_ids)]

    def end_episodes(self, episodes):
        self.ended += episodes

    def publish(self, update):
        self.version = update.version

    def stats(self):
        return EngineStats()

    def _rollout(self, request, number):
        ids = self.complete(request.prompt_ids, number)
        ids = ids if request.max_new_tokens is None else ids[: request.max_new_tokens]
        stops = ids[-1] in (TOKENIZER.eos_token_id, *request.stop_token_ids)
        return Rollout(ids, [-1.0] * len(ids), [self.version] * len(ids), "stop" if stops else "length")


def numbers(request):
    return range(request.first_rollout, request.first_rollout + request.num_rollouts)


def templates(**options) -> ChatTemplates:
    made = ChatTemplates(TOKENIZER, **options)
    made.adapt()
    return made


def runner_of(play, engine, **options) -> EpisodeRunner:
    options = {"reward_name": "play", "templates": templates(), "max_completion_length": 400, **options}
    options.setdefault("sampling", SamplingSettings(max_new_tokens=options["max_completion_length"]))
    return EpisodeRunner(engine, play, **options)


def tool_runner(engine, tools=(), factories=None, *, tool_timeout=None, instances=None, processes=None, **options):
    """A runner of TRL's tools and environments, its `ToolRollout` and its pool."""
    environment_tools = factories and {name: list(tools) for name in factories}
    made = templates(tools=tools, environment_tools=environment_tools)
    calls = Calls(limit=64)
    pool = EnvironmentPool(factories, calls, instances or {}) if factories else None
    play = ToolRollout(
        list(tools), made, calls, pool=pool, environment_tools=environment_tools, tool_timeout=tool_timeout,
        several=bool(factories) and set(factories) != {None}, processes=processes,
    )  # fmt: skip
    runner = runner_of(play, engine, templates=made, dropped=play.retire, closing=play.close, **options)
    return runner, play, pool


request_ids = itertools.count()


def group(rollouts=2, key=0, prompt="q", **row) -> GroupRequest:
    messages = [{"role": "user", "content": prompt}]
    ids = tuple(TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return GroupRequest(next(request_ids), key, ids, rollouts, row={"prompt": messages, **row})


def played(runner, *requests):
    """The events that end `requests`, in their order."""
    runner.submit(requests)
    return ends(runner, requests)


def ends(runner, requests):
    found = {}

    def all_ended():
        for event in runner.wait(0.01):
            if isinstance(event, (GroupFinished, GroupFailed)):
                assert event.request_id not in found, "a request ends in one event"
                found[event.request_id] = event
        return len(found) == len(requests)

    until(all_ended)
    return [found[request.request_id] for request in requests]


def rollouts_of(runner, request):
    (event,) = played(runner, request)
    assert isinstance(event, GroupFinished), event
    return event.rollouts
