"""A server as the pool knows it, what it carries, and the calls it works on: no threads, no I/O."""

from dataclasses import dataclass, field
from typing import Literal

from trl_a3po.engines.vllm.servers.rollout_jobs import Job
from trl_a3po.engines.vllm.servers.server import Server, ServerInfo


@dataclass(frozen=True)
class ServedWeights:
    """What the servers carry: a policy version, the model's name in a request ("": the server's own), and the salt of
    its prefix cache."""

    version: int
    model: str
    salt: str


@dataclass(eq=False)
class InFlightCall:
    """A call being made."""

    job: Job
    member: "PooledServer"
    served_weights: ServedWeights
    number: int
    name: str  # of the request, for the server
    publishes: list[tuple[int, list[int | None]]] = field(default_factory=list)
    """Of each publish since the call was made: the version before it, and how many tokens each sequence had, or `None`
    for a finished one."""

    def versions_of(self, index: int, count: int) -> list[int]:
        """The versions of the `count` tokens of a sequence, of which the last may be newer than the call's first."""
        versions: list[int] = []
        for version, tokens in self.publishes:
            until = tokens[index]
            versions += [version] * ((count if until is None else until) - len(versions))
        current = self.member.version if self.publishes else self.served_weights.version
        return (versions + [current] * (count - len(versions)))[:count]


@dataclass(eq=False)
class PooledServer:
    """A server in the pool and its state.

    "live": the server carries the current weights and gets work. "behind": the server answers, and gets work once the
    current weights have been published to it. "down": the server does not answer.
    """

    server: Server
    info: ServerInfo  # as of the last time it was found to answer
    state: Literal["live", "behind", "down"] = "down"
    running: set[InFlightCall] = field(default_factory=set)
    version: int = -1
    lives: int = 0  # times it was found to answer: after the next one it may be another process
    pings_missed: int = 0
    last_fault: str = "it was never reached"

    @property
    def load(self) -> int:
        return sum(len(call.job.sequences) for call in self.running)

    def has_room(self, count: int) -> bool:
        # Up to half of `max_num_seqs` more wait at the server, so that a free place is taken at once.
        most = self.info.max_num_seqs
        return self.load + count <= max(count, most + most // 2)
