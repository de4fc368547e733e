"""The servers of a run and the rollouts they work on: which server samples what, and what happens when a server fails.

Guarantees:

- every submitted request ends in one event or is cancelled; a call that fails is repeated, a few times, on the server
  with the least to do, and the tokens sampled by then are kept with their versions;
- a later turn of an episode goes to the server that sampled the turn before, if there is room for it, because its keys
  and values may still be there. If they are kept across publishes, it goes on with the salt of the first turn;
- a server gets work only while it carries the weights that are served now: a server that was lost and comes back gets
  those weights first (`server_watch.py`).

Where a token gets its version: in `ServerPool._record_tokens`, when an answer arrives. There are two cases.

1. Adapters, and whole weights with `kv_on_publish="recompute"`: a call names the weights of one version and ends
   before those weights change, so all its tokens carry the version of the call.
2. Whole weights with `kv_on_publish="keep"`: a call goes on while the weights change. While a server is paused for a
   publish, it says how many tokens each of its sequences has (`a3po_server.py`), and `note_publish` keeps these counts
   with the call. When the answer has come, the tokens up to a count carry the version before that publish.

Threads: one for each call (`calls.py`).
"""

import itertools
import logging
import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trl_a3po.engines.vllm.noise import noise_seed
from trl_a3po.engines.vllm.servers.calls import CallRequest, Calls, Ended
from trl_a3po.engines.vllm.servers.completions import completion_body
from trl_a3po.engines.vllm.servers.http import AnswerFault, ConnectionFault, HttpFault, StatusFault, TimeoutFault
from trl_a3po.engines.vllm.servers.image_bodies import too_large
from trl_a3po.engines.vllm.servers.pooled_server import InFlightCall, PooledServer, ServedWeights
from trl_a3po.engines.vllm.servers.rollout_jobs import Job, JobQueue, PartialGroup
from trl_a3po.engines.vllm.servers.server import Server, ServerInfo
from trl_a3po.engines.vllm.servers.token_chunks import TokenChunk
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import EngineEvent, GroupFailed, GroupRequest, SamplingSettings

logger = logging.getLogger(__name__)

MOST_TRIES = 5
IDLE_TIMEOUT = 60.0  # seconds for calls to return once a server has ended them


class ServerPool:
    """
    Args:
        servers: at least one, each with what it says of itself.
        sampling: the same for every request.
        request_timeout: seconds for one call.
        seeds: every call names the seed of its noise.
        keeps_prefixes: a later turn may go on with keys and values that were computed before a publish.
    """

    def __init__(
        self,
        servers: Iterable[tuple[Server, ServerInfo]],
        sampling: SamplingSettings,
        *,
        request_timeout: float,
        seeds: bool = False,
        keeps_prefixes: bool = False,
    ):
        self.members = [PooledServer(server, info) for server, info in servers]
        self._sampling = sampling
        self._request_timeout = request_timeout
        self._seeds = seeds
        self._keeps_prefixes = keeps_prefixes
        self.changing = threading.RLock()  # held while what servers carry is changed
        self._changed = threading.Condition()  # guards all that follows, and the members
        self._served_weights: ServedWeights | None = None
        self._held = False
        self._calls = Calls(self._receive)
        self._numbers = itertools.count()
        self._run = uuid.uuid4().hex
        self._in_flight: dict[int, InFlightCall] = {}
        self._jobs = JobQueue()
        self._groups: dict[int, PartialGroup] = {}
        self._prefixes: dict[int, tuple[PooledServer, str]] = {}  # by episode: where the last turn was, and its salt
        self._events: list[EngineEvent] = []
        self._error: str | None = None
        self._closed = self._was_busy = False
        self._over = threading.Event()
        self._busy_since: float | None = None
        self.busy_seconds = 0.0
        self.tokens = 0
        self.counts = dict.fromkeys(("servers_lost", "servers_back", "calls_failed", "timeouts", "garbage_answers"), 0)

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        with self._changed:
            self._raise_if_over()
            for request in requests:
                group = self._groups[request.request_id] = PartialGroup.of(request, self._sampling)
                self._jobs.append(Job(group, list(group.sequences)))
            self._dispatch()

    def wait(self, timeout: float) -> list[EngineEvent]:
        with self._changed:
            if not self._events and self._error is None:
                self._changed.wait(timeout)
            if not self._events:
                self._raise_if_over()
            events, self._events = self._events, []
            return events

    def cancel(self, request_ids: Sequence[int]) -> None:
        with self._changed:
            for request_id in request_ids:
                if group := self._groups.pop(request_id, None):
                    group.cancelled = True
            self._jobs.drop_cancelled()
            for member in self.members:
                for call in member.running:
                    if call.job.group.cancelled:
                        self._calls.end(call.number)
            cancelled = set(request_ids)
            self._events = [event for event in self._events if event.request_id not in cancelled]

    def end_episodes(self, episodes: Sequence[int]) -> None:
        with self._changed:
            for episode in episodes:
                self._prefixes.pop(episode, None)

    # --- servers ------------------------------------------------------------------------------------------------

    def reachable(self) -> list[PooledServer]:
        """Members that answer, so that weights can be published to them."""
        with self._changed:
            return [member for member in self.members if member.state != "down"]

    def live(self) -> list[PooledServer]:
        with self._changed:
            return [member for member in self.members if member.state == "live"]

    def admit(self, member: PooledServer, info: ServerInfo) -> None:
        """A server answers again."""
        with self._changed:
            member.info, member.pings_missed = info, 0
            member.state, member.version, member.lives = "behind", -1, member.lives + 1

    def mark_back(self, member: PooledServer, served_weights: ServedWeights) -> None:
        """A server that answers again carries the current publication, `served_weights`."""
        with self._changed:
            member.state, member.version = "live", served_weights.version
            self.counts["servers_back"] += 1
            self._dispatch()

    def set_served_weights(self, served_weights: ServedWeights, carriers: Sequence[PooledServer]) -> None:
        """From now on work goes to `carriers`, which carry `served_weights`, and is stamped with its version."""
        with self._changed:
            if self._served_weights is not None and served_weights.version <= self._served_weights.version:
                self._prefixes.clear()
            self._served_weights = served_weights
            for member in self.members:
                if member in carriers and member.state != "down":
                    member.state, member.version = "live", served_weights.version
                elif member.state == "live":
                    member.state = "behind"
            self._dispatch()

    def in_use(self) -> set[str]:
        """Model names of the calls being made."""
        with self._changed:
            return {call.served_weights.model for member in self.members for call in member.running}

    def hold_jobs(self, held: bool) -> None:
        """Whether jobs wait in the pool instead of being sent to servers."""
        with self._changed:
            self._held = held
            self._dispatch()

    def mark_lost(self, member: PooledServer, why: str) -> None:
        with self._changed:
            self._lose(member, why)

    def abort_calls(self, member: PooledServer, *, all_of_them: bool) -> None:
        """Pause a server and end its calls. Their rollouts continue in new calls, under the weights served then.

        Args:
            member: the server.
            all_of_them: wait until every call has returned, also a call that reaches the server in the meantime. The
                server stays paused.
        """
        deadline = time.monotonic() + IDLE_TIMEOUT
        while True:
            member.server.pause("abort")
            with self._changed:
                if not all_of_them or self._changed.wait_for(lambda: not member.running, 0.25):
                    return
            if time.monotonic() > deadline:
                raise TimeoutFault(f"{member.server.url} did not end its calls within {IDLE_TIMEOUT:g} s.")

    def note_publish(self, member: PooledServer) -> None:
        """Note how many tokens each sequence of a paused server has: the later ones belong to the next version."""
        with self._changed:
            calls = list(member.running)
        if not calls:
            return
        counts = member.server.token_counts()
        with self._changed:
            for call in calls:
                sequences = range(len(call.job.sequences))
                call.publishes.append((member.version, [counts.of(call.name, index) for index in sequences]))

    # --- any thread ---------------------------------------------------------------------------------------------

    def numbers(self) -> tuple[int, int, float, dict[str, float]]:
        """Sequences being decoded, requests waiting here, busy seconds, and the counts."""
        with self._changed:
            busy = self.busy_seconds + (time.monotonic() - self._busy_since if self._busy_since else 0.0)
            live = sum(member.state == "live" for member in self.members)
            active = sum(member.load for member in self.members)
            return active, len(self._jobs), busy, {**self.counts, "servers_live": live}

    @property
    def served_weights(self) -> ServedWeights | None:
        """What servers carry to be given work; `None` before the first."""
        return self._served_weights

    @property
    def can_sample(self) -> bool:
        """Whether a server carries the current publication, or none is meant to yet."""
        with self._changed:
            return self._served_weights is None or self._held or any(m.state == "live" for m in self.members)

    @property
    def is_behind(self) -> bool:
        """Whether servers can be reached, but none that carries the current publication."""
        with self._changed:
            states = {member.state for member in self.members}
            return "behind" in states and "live" not in states and not self._held

    def dispatch(self) -> None:
        """Hand out what has waited long enough."""
        with self._changed:
            self._dispatch()

    def is_over(self, timeout: float = 0.0) -> bool:
        """Whether the pool is closed or has ended with an error. Waits for up to `timeout` seconds."""
        return self._over.wait(timeout)

    def end_with(self, error: str) -> None:
        with self._changed:
            self._end_with(error)

    @property
    def was_busy(self) -> bool:
        """Whether there were calls when the pool was closed."""
        return self._was_busy

    def raise_if_over(self) -> None:
        with self._changed:
            self._raise_if_over()

    def close(self) -> None:
        with self._changed:
            self._was_busy = self._was_busy or any(member.running for member in self.members)
            self._closed = True
            self._over.set()
            self._jobs.clear()
            self._changed.notify_all()
        self._calls.close()

    # --- calls --------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Hand out what waits; the caller holds the lock."""
        if self._held or self._closed or self._error or self._served_weights is None:
            return
        for job in self._jobs.due():
            candidates = [m for m in self.members if m.state == "live"]
            if reason := _too_large(job) or self._too_long(job, candidates):
                self._jobs.remove(job)
                self._fail(job.group, reason)
                continue
            candidates = [m for m in candidates if m.has_room(len(job.sequences))]
            if not candidates:
                return
            self._jobs.remove(job)
            self._call(job, *self._place(job, candidates, self._served_weights))

    def _place(
        self, job: Job, candidates: list[PooledServer], weights: ServedWeights
    ) -> tuple[PooledServer, ServedWeights]:
        """The server that a job goes to, and the weights with the salt that its call names."""
        member = min(candidates, key=lambda m: m.load / m.info.max_num_seqs)
        episode = job.group.request.episode_of(job.number)
        if episode is None or episode not in self._prefixes:
            return member, weights
        home, salt = self._prefixes[episode]
        return home if home in candidates else member, replace(weights, salt=salt) if self._keeps_prefixes else weights

    def _call(self, job: Job, member: PooledServer, served_weights: ServedWeights) -> None:
        done, request, sampling = len(job.sequences[0].token_ids), job.group.request, job.group.sampling
        position = request.first_position + done
        seed = noise_seed(sampling.seed, request.noise_key, job.number, position) if self._seeds else None
        body = completion_body(
            sampling,
            served_weights.model or member.info.model,
            served_weights.salt,
            job.prompt_ids,
            count=len(job.sequences),
            done=done,
            seed=seed,
        )
        number = next(self._numbers)
        call = InFlightCall(job, member, served_weights, number, f"a3po-{self._run}-{number}")
        member.running.add(call)
        self._in_flight[call.number] = call
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self._calls.make(
            CallRequest(call.number, call.name, member.server.url, body, self._request_timeout, request.images)
        )

    def _receive(self, ended: Ended) -> None:
        """What a call brought at its end."""
        try:
            with self._changed:
                if call := self._in_flight.get(ended.number):
                    fault = ended.fault
                    try:
                        self._record_tokens(call, ended.chunks)
                    except AnswerFault as error:
                        fault = error
                    self._returned(call, fault)
                if ended.error is not None:
                    self._end_with(f"A call of the vLLM engine failed by itself:\n{ended.error}")
                self._dispatch()
                self._changed.notify_all()
        except BaseException:
            self.end_with(f"The vLLM engine failed by itself:\n{traceback.format_exc()}")

    def _record_tokens(self, call: InFlightCall, chunks: Iterable[TokenChunk]) -> None:
        """Note what was sampled; the caller holds the lock."""
        if call not in call.member.running:  # its server was lost, and the job has gone elsewhere
            return
        for chunk in chunks:
            versions = call.versions_of(chunk.index, len(chunk.token_ids))
            sequence, group = call.job.sequences[chunk.index], call.job.group
            sequence.add(chunk, versions, group.sampling)
            self.tokens += len(chunk.token_ids)
            episode = group.request.episode_of(group.number_of(sequence))
            if episode is not None and sequence.finish and not group.cancelled:
                self._prefixes[episode] = call.member, call.served_weights.salt

    def _returned(self, call: InFlightCall, fault: HttpFault | None) -> None:
        """Account for a call that has ended; the caller holds the lock."""
        member, job = call.member, call.job
        del self._in_flight[call.number]
        given_up = call not in member.running  # by `_lose`, which has put its job back
        member.running.discard(call)
        if self._busy_since is not None and not any(m.running for m in self.members):
            self.busy_seconds += time.monotonic() - self._busy_since
            self._busy_since = None
        if given_up or self._closed or job.group.cancelled:
            return
        if fault is not None:
            self._failed(call, fault)
        elif job.group.finished:
            if self._groups.pop(job.group.request.request_id, None):
                self._events.append(job.group.event())
        else:
            self._jobs.put_back(job.rest(failed=False))

    def _failed(self, call: InFlightCall, fault: HttpFault) -> None:
        member, job = call.member, call.job
        self.counts["calls_failed"] += 1
        self.counts["timeouts"] += isinstance(fault, TimeoutFault)
        self.counts["garbage_answers"] += isinstance(fault, AnswerFault)
        refused = isinstance(fault, StatusFault) and fault.status in (400, 413, 422)
        if job.tries + 1 >= MOST_TRIES or refused:
            self._fail(job.group, f"{'Refused' if refused else f'Failed {MOST_TRIES} times in a row'}: {fault}")
        else:
            self._jobs.put_back(job.rest(failed=True))
        # A server that does not know the adapter is not the one that was published to.
        if isinstance(fault, ConnectionFault) or (isinstance(fault, StatusFault) and fault.status == 404):
            self._lose(member, str(fault))

    def _fail(self, group: PartialGroup, reason: str) -> None:
        if self._groups.pop(group.request.request_id, None):
            self._events.append(GroupFailed(group.request.request_id, reason))
        group.cancelled = True
        self._jobs.drop_cancelled()
        self._changed.notify_all()

    def _too_long(self, job: Job, candidates: list[PooledServer]) -> str | None:
        new_tokens = job.group.sampling.max_new_tokens
        length = len(job.group.request.prompt_ids) + new_tokens
        for member in candidates:
            if length > member.info.max_model_len:
                return (
                    f"A prompt of {len(job.group.request.prompt_ids)} tokens and {new_tokens} new ones do not "
                    f"fit into the {member.info.max_model_len} of {member.server.url}: start it with a "
                    f"larger --max-model-len."
                )
        return None

    def _lose(self, member: PooledServer, why: str) -> None:
        """Its work goes elsewhere; the caller holds the lock."""
        member.last_fault = why
        if member.state == "down":
            return
        member.state, member.version = "down", -1
        self.counts["servers_lost"] += 1
        if not self._closed:
            logger.warning("A vLLM server was lost, with %d rollouts in work: %s", member.load, why)
        calls, member.running = member.running, set()
        for call in calls:
            if not call.job.group.cancelled:
                self._jobs.put_back(call.job.rest(failed=False))
            self._calls.end(call.number)
        self._dispatch()
        self._changed.notify_all()

    def _end_with(self, error: str) -> None:
        if self._error is None:
            self._error = error
            self._over.set()
        for request_id in list(self._groups):
            self._events.append(GroupFailed(request_id, error.splitlines()[0]))
        self._groups.clear()
        self._jobs.clear()
        self._changed.notify_all()

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise EngineError(self._error)
        if self._closed:
            raise EngineError("The engine is closed.")


def _too_large(job: Job) -> str | None:
    images = job.group.request.images
    return None if images is None else too_large(images)
