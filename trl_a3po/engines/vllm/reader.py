"""The process that makes calls of completions and reads their answers, with an interpreter lock of its own.

A streamed token takes 10 to 20 microseconds to read, which in the trainer's process would be taken from launching
kernels. It is told of calls over a channel, and tells of their tokens (`calls.py`), every second also of none.
Imports neither torch nor TRL.
"""

import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence

from trl_a3po.engines.vllm.calls import Barrier, CallRequest, Ended, ReaderUpdate
from trl_a3po.engines.vllm.http import Call, HttpFault
from trl_a3po.engines.vllm.server import Server
from trl_a3po.engines.vllm.token_chunks import TokenChunk, parse_answer, parse_events
from trl_a3po.workers.channel import Channel
from trl_a3po.workers.process import parents_channel

PACE = 0.005  # seconds from one message to the next, so that each has much to tell
BEAT = 1.0  # seconds after which it is told that there is nothing
QUIET = 5  # looks, each 10 ms after the last, at which nothing more may have come of the calls of a mark


class Outbox:
    """What is to be told, and the thread that tells it."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._changed = threading.Condition()
        self._chunks: dict[int, list[TokenChunk]] = {}
        self._ended: list[Ended] = []
        self._barriers: list[int] = []
        self._added: Counter[int] = Counter()  # times, by call that has not ended

    def add(self, number: int, chunks: list[TokenChunk]) -> None:
        with self._changed:
            self._chunks.setdefault(number, []).extend(chunks)
            self._added[number] += 1
            self._changed.notify()

    def end(self, ended: Ended) -> None:
        with self._changed:
            self._ended.append(ended)
            del self._added[ended.number]
            self._changed.notify()

    def barrier(self, number: int) -> None:
        with self._changed:
            self._barriers.append(number)
            self._changed.notify()

    def added(self, numbers: Sequence[int]) -> list[int]:
        """How often something was added of some calls."""
        with self._changed:
            return [self._added[number] for number in numbers]

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks or self._ended or self._barriers, BEAT)
                chunks, self._chunks = self._chunks, {}
                ended, self._ended = self._ended, []
                barriers, self._barriers = self._barriers, []
            self._channel.send(
                ReaderUpdate({number: list(map(tuple, some)) for number, some in chunks.items()}, ended, barriers)
            )
            self._channel.drain()
            time.sleep(PACE)


def main() -> None:
    channel = parents_channel()
    outbox, calls = Outbox(channel), {}
    threading.Thread(target=outbox.run, daemon=True).start()
    while True:
        try:
            message = channel.receive_one()
        except EOFError:
            os._exit(0)
        if isinstance(message, CallRequest):
            call = calls[message.number] = Server(message.url).completion(message.body, message.timeout)
            threading.Thread(target=make, args=(message, call, outbox, calls), daemon=True).start()
        elif isinstance(message, Barrier):
            threading.Thread(target=reach_barrier, args=(message, outbox, calls), daemon=True).start()
        elif call := calls.get(message):
            call.end()


def make(request: CallRequest, call: Call, outbox: Outbox, calls: dict[int, Call]) -> None:
    """The thread of one call."""
    fault = error = None
    try:
        count = request.body["n"]
        if request.body["stream"]:
            for events in call.events():
                chunks, fault = parse_events(events, count)
                outbox.add(request.number, chunks)
                if fault is not None:
                    break
        else:
            outbox.add(request.number, parse_answer(call.data(), count))
    except HttpFault as broken:
        fault = broken
    except BaseException:
        error = traceback.format_exc()
    del calls[request.number]
    outbox.end(Ended(request.number, fault, error))


def reach_barrier(barrier: Barrier, outbox: Outbox, calls: dict[int, Call]) -> None:
    """The thread of one mark. It ends with the process where the servers do not stop sending."""
    quiet, before = 0, outbox.added(barrier.calls)
    while quiet < QUIET:
        time.sleep(0.01)
        open_calls = [call for number in barrier.calls if (call := calls.get(number))]
        added = outbox.added(barrier.calls)
        quiet = quiet + 1 if added == before and not any(call.has_arrived for call in open_calls) else 0
        before = added
    outbox.barrier(barrier.number)


if __name__ == "__main__":
    main()
