"""Looking after the servers of a pool: which can be reached, bringing back those that were lost, and when to give up.

Guarantees: a server that comes back is checked again and carries the current publication before it gets work; all
servers out of reach for `outage_timeout` seconds end the run with one error, as does what goes wrong here. Time in
which this process is stopped does not count.

Threads: one for each server.
"""

import logging
import threading
import traceback
from collections.abc import Callable

from trl_a3po.engines.vllm.servers.http import HttpFault, TimeoutFault
from trl_a3po.engines.vllm.servers.pool import ServerPool
from trl_a3po.engines.vllm.servers.pooled_server import PooledServer
from trl_a3po.engines.vllm.servers.server import Server, ServerInfo
from trl_a3po.errors import EngineError
from trl_a3po.workers.running_clock import RunningClock

logger = logging.getLogger(__name__)

MISSED_PINGS = 3
LONGEST_LOOK = 15.0
"""Seconds between two looks at a server, of which most may pass in a ping that gets no answer."""


class ServerWatch:
    """
    Args:
        pool: closed before this is.
        check: facts of a server -> raises `EngineError` if it does not fit the run.
        deliver: has a member carry what was published last; `None`: only a publish can.
        outage_timeout: seconds without any server.
        poll: seconds between two looks at a server.
    """

    def __init__(
        self,
        pool: ServerPool,
        *,
        check: Callable[[Server, ServerInfo], None],
        deliver: Callable[[PooledServer], None] | None,
        outage_timeout: float,
        poll: float,
    ):
        self._pool = pool
        self._check = check
        self._deliver = deliver
        self._outage_timeout = outage_timeout
        self._poll = poll
        self._clock = RunningClock(LONGEST_LOOK)
        self._alive_at = self._clock()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._alive_at = self._clock()
        for number, member in enumerate(self._pool.members):
            thread = threading.Thread(target=self._watch, args=(member,), name=f"a3po-vllm-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(2.0)

    def _watch(self, member: PooledServer) -> None:
        """The thread of one server."""
        while True:
            try:
                self._look_at(member)
            except EngineError as error:
                self._pool.end_with(str(error))
            except BaseException:
                self._pool.end_with(f"Watching {member.server.url} failed by itself:\n{traceback.format_exc()}")
            self._note_outage()
            self._pool.dispatch()  # what has waited long enough
            if self._pool.is_over(timeout=self._poll):
                return

    def _look_at(self, member: PooledServer) -> None:
        try:
            member.server.ping()
        except HttpFault as fault:
            member.pings_missed += 1
            member.last_fault = str(fault)
            if not isinstance(fault, TimeoutFault) or member.pings_missed >= MISSED_PINGS:
                self._pool.mark_lost(member, str(fault))
            return
        member.pings_missed = 0
        if member.state == "down":
            try:
                self._bring_up(member)
            except HttpFault as fault:
                member.last_fault = str(fault)
            except EngineError as error:  # another server answers there now
                if member.last_fault != str(error):
                    logger.warning("%s", error)
                member.last_fault = str(error)

    def _bring_up(self, member: PooledServer) -> None:
        info = member.server.info()
        self._check(member.server, info)
        with self._pool.changing:
            if self._pool.is_over():
                return
            self._pool.admit(member, info)
            served_weights = self._pool.served_weights
            if served_weights is None:
                return
            if self._deliver is None:
                member.last_fault = "it answers again, and gets the weights with the next publish"
                return
            try:
                self._deliver(member)
            except HttpFault as fault:
                self._pool.mark_lost(member, str(fault))
                return
            self._pool.mark_back(member, served_weights)
        logger.warning("%s is back and carries version %d.", member.server.url, served_weights.version)

    def _note_outage(self) -> None:
        now = self._clock()
        if self._pool.can_sample or self._pool.is_over():
            self._alive_at = now
        elif now - self._alive_at > self._outage_timeout:
            faults = "; ".join(f"{member.server.url}: {member.last_fault}" for member in self._pool.members)
            self._pool.end_with(
                f"No vLLM server has been able to sample for {self._outage_timeout:g} s ({faults}). Start the servers "
                "again and resume from the last checkpoint."
            )
