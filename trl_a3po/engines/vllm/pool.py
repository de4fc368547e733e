"""The servers of a run and the rollouts they work on: who gets what, and what happens when one fails.

Guarantees:
- every submitted request ends in one event, or is cancelled; a call that fails is made again, a few times, on the
  server with the least to do, and what had been sampled by then is kept, with its versions;
- a server gets work only while it carries the publication that is current: one that was lost, or comes back, gets it
  first (`server_watch.py`);
- a token's version: every call names the weights of one version and ends before they change, so its tokens carry that
  version. The exception is `streams`, for whole weights with `kv_on_publish="keep"`: there each token carries the
  version of its server's weights when it arrives, and a publish changes that version while the server is paused and
  has sent all it had sampled, by its own count of tokens. Where that does not come out (another client, or events of
  several tokens), all that it has sent is read, or dropped with its calls; what it may still hold back is one event of
  each sequence: the first after such a publish carries the older version, and is counted.

Threads: one that is told what servers sent, by the process that makes the calls (`calls.py`).
"""

import itertools
import logging
import threading
import time
import traceback
from collections.abc import Iterable, Sequence

from trl_a3po.engines.vllm.calls import Ask, Calls, Told
from trl_a3po.engines.vllm.completions import completion_body, noise_seed
from trl_a3po.engines.vllm.http import AnswerFault, ConnectionFault, HttpFault, LimitFault, StatusFault
from trl_a3po.engines.vllm.pooled_server import Member, Publication, Running
from trl_a3po.engines.vllm.rollout_jobs import Group, Job, JobQueue
from trl_a3po.engines.vllm.server import Facts, Server
from trl_a3po.engines.vllm.token_chunks import Piece
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import EngineEvent, GroupFailed, GroupRequest, SamplingSettings

logger = logging.getLogger(__name__)

MOST_TRIES = 5
SETTLE_LIMIT = 2.0
CATCH_UP_LIMIT = 10.0  # seconds for what a paused server has sent to be read
IDLE_LIMIT = 60.0  # seconds for calls to return once a server has ended them


class ServerPool:
    """
    Args:
        servers: at least one.
        sampling: the same for every request.
        streams: tokens are taken as they come (see the versions above).
        request_limit: seconds for one call.
        seeds: every call names the seed of its noise.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        sampling: SamplingSettings,
        *,
        streams: bool,
        request_limit: float,
        seeds: bool = False,
    ):
        self.members = [Member(server) for server in servers]
        self._sampling = sampling
        self._streams = streams
        self._request_limit = request_limit
        self._seeds = seeds
        self.changing = threading.RLock()  # held while what servers carry is changed
        self._changed = threading.Condition()  # guards all that follows, and the members
        self._publication: Publication | None = None
        self._held = False
        self._calls = Calls(self._told)
        self._numbers = itertools.count()
        self._made: dict[int, Running] = {}
        self._jobs = JobQueue()
        self._groups: dict[int, Group] = {}
        self._events: list[EngineEvent] = []
        self._error: str | None = None
        self._closed = self._was_busy = False
        self._over = threading.Event()
        self._busy_since: float | None = None
        self.busy_seconds = 0.0
        self.tokens = 0
        self.counts = dict.fromkeys(
            ("servers_lost", "servers_back", "calls_failed", "timeouts", "garbage_answers", "bounded_tokens"), 0
        )

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        with self._changed:
            self._raise_if_over()
            for request in requests:
                group = self._groups[request.request_id] = Group.of(request)
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

    # --- servers ------------------------------------------------------------------------------------------------

    def targets(self) -> list[Member]:
        """Members that can be published to."""
        with self._changed:
            return [member for member in self.members if member.state != "down"]

    def live(self) -> list[Member]:
        with self._changed:
            return [member for member in self.members if member.state == "live"]

    def admit(self, member: Member, facts: Facts) -> None:
        """A server answers again."""
        with self._changed:
            member.facts, member.pings_missed = facts, 0
            member.state, member.version, member.lives = "behind", -1, member.lives + 1

    def back(self, member: Member) -> None:
        """A server that answers again carries the current publication."""
        with self._changed:
            member.state, member.version, member.counted = "live", self._publication.version, None
            self.counts["servers_back"] += 1
            self._dispatch()

    def set_publication(self, publication: Publication, carriers: Sequence[Member]) -> None:
        """From now on work goes to `carriers`, which carry `publication`, and is stamped with its version."""
        with self._changed:
            self._publication = publication
            for member in self.members:
                if member in carriers and member.state != "down":
                    member.state, member.version = "live", publication.version
                elif member.state == "live":
                    member.state = "behind"
            self._dispatch()

    def scored(self, member: Member, tokens: int) -> None:
        """A server has sampled `tokens` of another's calls."""
        with self._changed:
            member.received += tokens

    def in_use(self) -> set[str]:
        """Model names of the calls being made."""
        with self._changed:
            return {call.publication.model for member in self.members for call in member.running}

    def hold(self, held: bool) -> None:
        """Whether work waits here instead of going out."""
        with self._changed:
            self._held = held
            self._dispatch()

    def lost(self, member: Member, why: str) -> None:
        with self._changed:
            self._lose(member, why)

    def abort_calls(self, member: Member, *, all_of_them: bool) -> None:
        """Have a server end its calls where they are; they go out again under the publication that is current then.

        Args:
            all_of_them: wait until every call has returned, also one that reaches the server meanwhile; it stays
                paused.
        """
        deadline = time.monotonic() + IDLE_LIMIT
        while True:
            member.server.pause("abort")
            with self._changed:
                if not all_of_them or self._changed.wait_for(lambda: not member.running, 0.25):
                    return
            if time.monotonic() > deadline:
                raise LimitFault(f"{member.server.url} did not end its calls within {IDLE_LIMIT:g} s.")

    def settle(self, member: Member) -> None:
        """Wait until a paused server has sent all it had sampled; afterwards its tokens are of the next version."""
        deadline = time.monotonic() + SETTLE_LIMIT
        total, even = self._count(member)
        while even is False and time.monotonic() < deadline:
            time.sleep(0.01)
            total, even = self._count(member)
        if not even:
            time.sleep(0.1)  # for what is still on its way
            with self._changed:
                calls = [call.number for call in member.running]
            self._calls.catch_up(calls, CATCH_UP_LIMIT)
            total, even = self._count(member)
        with self._changed:
            member.counted, member.received = total, 0
            for call in member.running:
                call.bounded = set() if even else set(range(len(call.job.sequences)))

    def _count(self, member: Member) -> tuple[int | None, bool | None]:
        """Tokens that a server has sampled, by its own count, and whether all have come, where that follows."""
        total = member.server.generated_tokens()
        with self._changed:
            if total is None or member.counted is None or member.facts.stream_interval != 1:
                return total, None
            return total, member.counted + member.received == total

    # --- any thread ---------------------------------------------------------------------------------------------

    def numbers(self) -> tuple[int, int, float, dict[str, float]]:
        """Sequences being decoded, requests waiting here, busy seconds, and the counts."""
        with self._changed:
            busy = self.busy_seconds + (time.monotonic() - self._busy_since if self._busy_since else 0.0)
            live = sum(member.state == "live" for member in self.members)
            active = sum(member.load for member in self.members)
            return active, len(self._jobs), busy, {**self.counts, "servers_live": live}

    @property
    def publication(self) -> Publication | None:
        """What servers carry to be given work; `None` before the first."""
        return self._publication

    @property
    def can_sample(self) -> bool:
        """Whether a server carries the current publication, or none is meant to yet."""
        with self._changed:
            return self._publication is None or self._held or any(m.state == "live" for m in self.members)

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

    def is_over(self, within: float = 0.0) -> bool:
        """Whether the pool is closed or has ended with an error, now or `within` so many seconds."""
        return self._over.wait(within)

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
        if self._held or self._closed or self._error or self._publication is None:
            return
        for job in self._jobs.due():
            candidates = [m for m in self.members if m.state == "live"]
            if reason := self._too_long(job, candidates):
                self._jobs.remove(job)
                self._fail(job.group, reason)
                continue
            candidates = [m for m in candidates if m.has_room(len(job.sequences))]
            if not candidates:
                return
            member = min(candidates, key=lambda m: m.load / m.facts.max_num_seqs)
            self._jobs.remove(job)
            self._call(job, member)

    def _call(self, job: Job, member: Member) -> None:
        publication, done = self._publication, len(job.sequences[0].token_ids)
        seed = noise_seed(self._sampling.seed, job.group.request.noise_key, job.number, done) if self._seeds else None
        body = completion_body(
            self._sampling,
            publication.model or member.facts.model,
            publication.salt,
            job.prompt_ids,
            count=len(job.sequences),
            done=done,
            stream=self._streams,
            seed=seed,
        )
        running = Running(job, member, publication, next(self._numbers))
        member.running.add(running)
        self._made[running.number] = running
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self._calls.make(Ask(running.number, member.server.url, body, self._request_limit))

    def _told(self, told: Told) -> None:
        """What servers sent, and which calls have ended."""
        try:
            with self._changed:
                for number, pieces in told.pieces.items():
                    if call := self._made.get(number):
                        try:
                            self._take(call, map(Piece._make, pieces))
                        except AnswerFault as fault:
                            self._calls.end(number)
                            self._returned(call, fault)
                for number, fault, error in told.ended:
                    if call := self._made.get(number):
                        self._returned(call, fault)
                    if error is not None:
                        self._end_with(f"A call of the vLLM engine failed by itself:\n{error}")
                self._dispatch()
                self._changed.notify_all()
        except BaseException:
            self.end_with(f"The vLLM engine failed by itself:\n{traceback.format_exc()}")

    def _take(self, call: Running, pieces: Iterable[Piece]) -> None:
        """Note what was sampled; the caller holds the lock."""
        if call not in call.member.running:  # its server was lost, and the job has gone elsewhere
            return
        for piece in pieces:
            version = call.member.version if self._streams else call.publication.version
            if piece.index in call.bounded and piece.token_ids:
                call.bounded.discard(piece.index)
                sequence = call.job.sequences[piece.index]
                version = sequence.versions[-1] if sequence.versions else version
                self.counts["bounded_tokens"] += len(piece.token_ids)
            call.job.sequences[piece.index].add(piece, version, self._sampling)
            self.tokens += len(piece.token_ids)
            call.member.received += len(piece.token_ids)

    def _returned(self, call: Running, fault: HttpFault | None) -> None:
        """Account for a call that has ended; the caller holds the lock."""
        member, job = call.member, call.job
        del self._made[call.number]
        given_up = call not in member.running  # by `_lose`, which has put its job back
        member.running.discard(call)
        if self._busy_since is not None and not any(m.running for m in self.members):
            self.busy_seconds += time.monotonic() - self._busy_since
            self._busy_since = None
        if given_up or self._closed or job.group.cancelled:
            member.counted = None
            return
        if fault is not None:
            self._failed(call, fault)
        elif job.group.finished:
            if self._groups.pop(job.group.request.request_id, None):
                self._events.append(job.group.event())
        else:
            self._jobs.put_back(job.rest(failed=False))

    def _failed(self, call: Running, fault: HttpFault) -> None:
        member, job = call.member, call.job
        member.counted = None
        self.counts["calls_failed"] += 1
        self.counts["timeouts"] += isinstance(fault, LimitFault)
        self.counts["garbage_answers"] += isinstance(fault, AnswerFault)
        refused = isinstance(fault, StatusFault) and fault.status in (400, 413, 422)
        if job.tries + 1 >= MOST_TRIES or refused:
            self._fail(job.group, f"{'Refused' if refused else f'Failed {MOST_TRIES} times in a row'}: {fault}")
        else:
            self._jobs.put_back(job.rest(failed=True))
        # A server that does not know the adapter is not the one that was published to.
        if isinstance(fault, ConnectionFault) or (isinstance(fault, StatusFault) and fault.status == 404):
            self._lose(member, str(fault))

    def _fail(self, group: Group, reason: str) -> None:
        if self._groups.pop(group.request.request_id, None):
            self._events.append(GroupFailed(group.request.request_id, reason))
        group.cancelled = True
        self._jobs.drop_cancelled()
        self._changed.notify_all()

    def _too_long(self, job: Job, candidates: list[Member]) -> str | None:
        length = len(job.group.request.prompt_ids) + self._sampling.max_new_tokens
        for member in candidates:
            if length > member.facts.max_model_len:
                return (
                    f"A prompt of {len(job.group.request.prompt_ids)} tokens and {self._sampling.max_new_tokens} new "
                    f"ones do not fit into the {member.facts.max_model_len} of {member.server.url}: start it with a "
                    f"larger --max-model-len."
                )
        return None

    def _lose(self, member: Member, why: str) -> None:
        """Its work goes elsewhere; the caller holds the lock."""
        member.last_fault = why
        if member.state == "down":
            return
        member.state, member.version, member.counted = "down", -1, None
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
