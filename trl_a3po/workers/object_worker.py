"""A process that holds one object: `python -m trl_a3po.workers.object_worker SOCKET PARENT`, started by
`RemoteObjects` alone.

Guarantees: the object is made, and the calls of the first thread that calls it are made, on the main thread; the calls
of another thread have a thread of their own, so that a call that hangs blocks no other one; a method that exits ends
the process; the process ends when its parent does.

It receives a factory, once, and then calls. It sends `made` or `failed`, and then an `answer` per call.
"""

import asyncio
import inspect
import os
import pickle
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from trl_a3po.workers.channel import Channel
from trl_a3po.workers.process import parents_channel

Work = Callable[[asyncio.Runner], None]


def main() -> None:
    channel = parents_channel()
    try:
        made = pickle.loads(channel.receive_one())()
    except BaseException as error:
        _send(channel, "failed", type(error).__name__, str(error), traceback.format_exc())
        return
    functions = [name for name, _ in inspect.getmembers(type(made), predicate=inspect.isfunction)]
    _send(channel, "made", type(made).__name__, [name for name in functions if not name.startswith("_")])
    first: queue.SimpleQueue[Work] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, made, first), daemon=True).start()
    _serve(first)


def _receive(channel: Channel, made: Any, first: "queue.SimpleQueue[Work]") -> None:
    """Hand each call to the thread that makes it."""
    queues: dict[int, queue.SimpleQueue[Work]] = {}
    while True:
        try:
            _, number, thread, method, arguments, named = channel.receive_one()
        except EOFError:  # the parent has closed its end
            os._exit(0)
        if thread not in queues:
            queues[thread] = queue.SimpleQueue() if queues else first
            if queues[thread] is not first:
                threading.Thread(target=_serve, args=(queues[thread],), daemon=True).start()
        call = _Call(channel, number, getattr(made, method), arguments, named)
        queues[thread].put(call)


def _serve(calls: "queue.SimpleQueue[Work]") -> None:
    with asyncio.Runner() as runner:
        while True:
            calls.get()(runner)


class _Call:
    """One call and its answer."""

    def __init__(
        self,
        channel: Channel,
        number: int,
        method: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ):
        self._channel, self._number = channel, number
        self._method, self._arguments, self._named = method, arguments, named

    def __call__(self, runner: asyncio.Runner) -> None:
        try:
            result = self._method(*self._arguments, **self._named)
            if inspect.isawaitable(result):
                result = runner.run(_awaited(result))
            answer: tuple[Any, ...] = ("returned", cloudpickle.dumps(result))
        except Exception as error:
            answer = ("raised", type(error).__name__, str(error), traceback.format_exc())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        _send(self._channel, "answer", self._number, *answer)


async def _awaited(result: Any) -> Any:
    return await result


def _send(channel: Channel, *message: Any) -> None:
    channel.send(message)
    channel.drain()


if __name__ == "__main__":
    main()
