"""The process that makes completion calls and reads their answers, with an interpreter lock of its own.

Reading a streamed token takes 10 to 20 microseconds, which the trainer's process needs for launching kernels. The
reader gets calls over a channel and sends back their tokens (`calls.py`); it sends an update at least once a second,
even an empty one. It imports neither torch nor TRL.
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

PACE = 0.005  # seconds between two updates, so that each holds many tokens
HEARTBEAT = 1.0  # seconds after which an empty update is sent
QUIET_CHECKS = 5  # checks in a row, 10 ms apart, at which nothing more has come for the calls of a barrier


class Outbox:
    """What is to be sent to the trainer's process, and the loop that sends it."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._changed = threading.Condition()
        self._chunks: dict[int, list[TokenChunk]] = {}
        self._ended: list[Ended] = []
        self._barriers: list[int] = []
        self._added: Counter[int] = Counter()  # how often chunks were added, by call that has not ended

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
        """How often chunks were added, for each of these calls."""
        with self._changed:
            return [self._added[number] for number in numbers]

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks or self._ended or self._barriers, HEARTBEAT)
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
        elif to_end := calls.get(message):
            to_end.end()


def make(request: CallRequest, call: Call, outbox: Outbox, calls: dict[int, Call]) -> None:
    """The thread of one call."""
    fault: HttpFault | None = None
    error: str | None = None
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
    """The thread of one barrier: report it once nothing more has come for its calls. Where a server does not stop
    sending, the thread runs until the process ends."""
    quiet, before = 0, outbox.added(barrier.calls)
    while quiet < QUIET_CHECKS:
        time.sleep(0.01)
        open_calls = [call for number in barrier.calls if (call := calls.get(number))]
        added = outbox.added(barrier.calls)
        quiet = quiet + 1 if added == before and not any(call.has_arrived for call in open_calls) else 0
        before = added
    outbox.barrier(barrier.number)


if __name__ == "__main__":
    main()
