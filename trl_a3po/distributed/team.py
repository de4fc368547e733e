"""The processes of one run: the main one decides and acts, the others follow it.

The queue, the engine and the reward functions live in the main process. Wherever the run meets them, every process
calls `lead` at the same place: the main one acts, the others wait for what came of it, and meanwhile do their part of
whatever needs all of them (gathering partitioned weights, for example) when the main one calls for it.

Guarantees: what the main process returns or raises is returned or raised in every process; nothing but the thread that
calls `lead` communicates; control messages go over the host's network and never occupy an accelerator; a process that
died is noticed by those that wait for it, in their own words. A run of one process communicates nothing.
"""

import atexit
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from trl_a3po.errors import TeamError

Result = TypeVar("Result")
DONE, RAISED, WAITING = "done", "raised", "waiting"


class Team:
    """Made by every process of the run at the same place, because the first one opens their connection.

    Args:
        patience: seconds a process waits for a message of the main one, which sends one at least every half minute
            while it waits for rollouts.
    """

    def __init__(self, patience: float = 1800.0):
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.size = dist.get_world_size() if several else 1
        self.rank = dist.get_rank() if several else 0
        self.is_main = self.rank == 0
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience)) if several else None
        if several:
            # Its threads would otherwise end the interpreter with an abort.
            atexit.register(_close, self._group)
        self._parts: dict[str, Callable[..., Any]] = {WAITING: lambda: None}

    def on_call(self, name: str, part: Callable[..., Any]) -> None:
        """`part` is what this process does when the main one calls `name`."""
        self._parts[name] = part

    def lead(self, action: Callable[[], Result]) -> Result:
        """What `action` returns in the main process, which alone runs it, in every process.

        Raises:
            TeamError: the main process, or one that should have followed, died.
            Exception: what `action` raised.
        """
        if self.size == 1:
            return action()
        return self._lead(action) if self.is_main else self._follow()

    def call(self, name: str, *arguments: Any) -> None:
        """Have the other processes do their part `name` now; by the main process, within `lead`."""
        if self.size > 1:
            self._send((name, arguments))

    def keep_waiting(self) -> None:
        """Tell the other processes that the main one is alive; by the main process, within `lead`."""
        self.call(WAITING)

    def gather(self, value: Any) -> list[Any] | None:
        """Every process's `value`, by rank, in the main process; `None` in the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.is_main else None
        with self._dying("gather from the others"):
            dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            with self._dying("meet the others"):
                dist.barrier(group=self._group)

    def _lead(self, action: Callable[[], Result]) -> Result:
        try:
            result = action()
        except TeamError:  # nobody is left to tell
            raise
        except BaseException as error:
            self._send((RAISED, _portable(error)))
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
            self._parts[name](*content)

    def _send(self, message: tuple[str, Any]) -> None:
        with self._dying("reach the others"):
            dist.broadcast_object_list([message], src=0, group=self._group)

    def _receive(self) -> tuple[str, Any]:
        received: list[Any] = [None]
        with self._dying("hear from the main process"):
            dist.broadcast_object_list(received, src=0, group=self._group)
        return received[0]

    def _dying(self, what: str) -> "_Dying":
        return _Dying(f"Process {self.rank} of {self.size} could not {what}")


class _Dying:
    """Turns what gloo raises when a peer is gone into a `TeamError`."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, TeamError):
            raise TeamError(
                f"{self._what}: a process of this run died or hangs, and its own output says why ({error})."
            ) from error


def _close(group: dist.ProcessGroup) -> None:
    if dist.is_initialized():  # else it is closed already
        dist.destroy_process_group(group)


def _portable(error: BaseException) -> BaseException:
    """`error`, or, where it cannot be sent to another process, a `TeamError` with its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever pickling a foreign class raises
        return TeamError(f"The main process raised {type(error).__name__}: {error}")
    return error
