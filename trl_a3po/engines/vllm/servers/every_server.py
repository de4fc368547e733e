"""One step on several servers at the same time.

Guarantees: a server on which the step fails does not stop the others.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trl_a3po.engines.vllm.servers.http import HttpFault
from trl_a3po.engines.vllm.servers.pooled_server import PooledServer


def on_every_server(
    members: Sequence[PooledServer],
    step: Callable[[PooledServer], Any],
    lost: Callable[[PooledServer, str], None],
) -> list[PooledServer]:
    """Call `step` for all members at the same time.

    Args:
        members: the servers.
        step: what to do with each server.
        lost: called with each member whose step raised an `HttpFault`, and the message of the fault.

    Returns:
        The members whose step succeeded.
    """
    if not members:
        return []
    done = []
    with ThreadPoolExecutor(len(members)) as executor:
        for member, future in [(member, executor.submit(step, member)) for member in members]:
            try:
                future.result()
                done.append(member)
            except HttpFault as fault:
                lost(member, str(fault))
    return done
