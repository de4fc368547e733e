"""The processes of one run: the main process decides and acts, the others follow.

The queue, the engine and the reward functions live in the main process. Wherever the run uses them, every process
calls `Team.run_on_main` at the same place: the main process acts, the others wait for the result. Where the action
needs all processes (gathering partitioned weights, for example), the main process calls the handler that the others
registered.

Guarantees: what the action returns or raises in the main process is returned or raised in every process; only the
thread that calls `run_on_main` communicates; control messages use the host's network and never an accelerator; a
process that waits for one that died raises `TeamError`. A run of one process communicates nothing.
"""

import atexit
import pickle
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from trl_a3po.errors import TeamError

Result = TypeVar("Result")
DONE, RAISED, HEARTBEAT = "done", "raised", "heartbeat"


class Team:
    """Every process of the run must create its `Team` at the same place, because that opens their connection.

    Args:
        timeout: seconds a process waits for a message of the main process, which sends one at least every half minute
            while it waits for rollouts.
    """

    def __init__(self, timeout: float = 1800.0):
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.size = dist.get_world_size() if several else 1
        self.rank = dist.get_rank() if several else 0
        self.is_main = self.rank == 0
        self._group: Any = None
        if several:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            # The group's threads would otherwise end the interpreter with an abort.
            atexit.register(_close, self._group)
        self._handlers: dict[str, Callable[..., Any]] = {HEARTBEAT: lambda: None}

    def on_call(self, name: str, handler: Callable[..., Any]) -> None:
        """Register what this process does when the main one calls `name`."""
        self._handlers[name] = handler

    def run_on_main(self, action: Callable[[], Result]) -> Result:
        """Run `action` in the main process alone, and return its result in every process.

        Raises:
            TeamError: a process died.
            Exception: what `action` raised, in every process.
        """
        if self.size == 1:
            return action()
        return self._run_and_send(action) if self.is_main else cast(Result, self._follow())

    def call_others(self, name: str, *arguments: Any) -> None:
        """Run the handler `name` in the other processes now. For the main process, inside `run_on_main`."""
        if self.size > 1:
            self._send((name, arguments))

    def send_heartbeat(self) -> None:
        """Tell the other processes that the main one is alive. For the main process, inside `run_on_main`."""
        self.call_others(HEARTBEAT)

    def gather(self, value: Any) -> list[Any] | None:
        """Every process's `value`, by rank, in the main process; `None` in the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        with self._peers_must_live("gather from the others"):
            dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def any(self, value: bool) -> bool:
        """Whether `value` is true in one of the processes. Every process calls this."""
        if self.size == 1:
            return value
        found = torch.tensor(int(value), device="cpu")
        with self._peers_must_live("compare notes with the others"):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def barrier(self) -> None:
        """Wait until every process has called this."""
        if self.size > 1:
            with self._peers_must_live("meet the others"):
                dist.barrier(group=self._group)

    def _run_and_send(self, action: Callable[[], Result]) -> Result:
        try:
            result = action()
        except TeamError:  # the connection is gone
            raise
        except BaseException as error:
            self._send((RAISED, _picklable(error)))
            raise
        self._send((DONE, result))
        return result

    def _follow(self) -> Any:
        while True:
            name, content = self._receive()
            if name == DONE:
                return content
            if name == RAISED:
                raise content
            self._handlers[name](*content)

    def _send(self, message: tuple[str, Any]) -> None:
        with self._peers_must_live("reach the others"):
            dist.broadcast_object_list([message], src=0, group=self._group)

    def _receive(self) -> tuple[str, Any]:
        received: list[Any] = [None]
        with self._peers_must_live("hear from the main process"):
            dist.broadcast_object_list(received, src=0, group=self._group)
        name, content = received[0]
        return name, content

    def _peers_must_live(self, what: str) -> "_PeersMustLive":
        return _PeersMustLive(f"Process {self.rank} of {self.size} could not {what}")


class _PeersMustLive:
    """Turns the `RuntimeError` that gloo raises when a peer is gone into a `TeamError`."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, TeamError):
            raise TeamError(
                f"{self._what}: a process of this run died or hangs; see its own output ({error})."
            ) from error


def _close(group: Any) -> None:
    if dist.is_initialized():  # otherwise the group is closed already
        dist.destroy_process_group(group)


def _picklable(error: BaseException) -> BaseException:
    """`error`, or, where it cannot be sent to another process, a `TeamError` with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever pickling a foreign class raises
        return TeamError(f"The main process raised {type(error).__name__}: {error}")
    return error
