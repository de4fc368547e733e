"""The process that makes calls of completions and reads their answers, with an interpreter lock of its own.

A streamed token takes 10 to 20 microseconds to read, which in the trainer's process would be taken from launching
kernels. It is told of calls over a channel, and tells of their tokens (`calls.py`). Imports neither torch nor TRL.
"""

import os
import threading
import time
import traceback

from trl_a3po.engines.embedded.channel import Channel
from trl_a3po.engines.embedded.process import parents_channel
from trl_a3po.engines.vllm.answers import Piece, parse_answer, parse_events
from trl_a3po.engines.vllm.calls import Ask, Ended, Told
from trl_a3po.engines.vllm.http import Call, HttpFault

PACE = 0.005  # seconds from one message to the next, so that each has much to tell


class Outbox:
    """What is to be told, and the thread that tells it."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._changed = threading.Condition()
        self._pieces: dict[int, list[Piece]] = {}
        self._ended: list[Ended] = []

    def add(self, number: int, pieces: list[Piece]) -> None:
        with self._changed:
            self._pieces.setdefault(number, []).extend(pieces)
            self._changed.notify()

    def end(self, ended: Ended) -> None:
        with self._changed:
            self._ended.append(ended)
            self._changed.notify()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._ended)
                pieces, self._pieces = self._pieces, {}
                ended, self._ended = self._ended, []
            self._channel.send(Told({number: list(map(tuple, some)) for number, some in pieces.items()}, ended))
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
        if isinstance(message, Ask):
            call = calls[message.number] = Call(
                message.url, "POST", "/v1/completions", message.body, limit=message.limit
            )
            threading.Thread(target=make, args=(message, call, outbox, calls), daemon=True).start()
        elif call := calls.get(message):
            call.end()


def make(ask: Ask, call: Call, outbox: Outbox, calls: dict[int, Call]) -> None:
    """The thread of one call."""
    fault = error = None
    try:
        count = ask.body["n"]
        if ask.body["stream"]:
            for events in call.events():
                pieces, fault = parse_events(events, count)
                outbox.add(ask.number, pieces)
                if fault is not None:
                    break
        else:
            outbox.add(ask.number, parse_answer(call.text(), count))
    except HttpFault as broken:
        fault = broken
    except BaseException:
        error = traceback.format_exc()
    del calls[ask.number]
    outbox.end(Ended(ask.number, fault, error))


if __name__ == "__main__":
    main()
