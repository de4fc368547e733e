"""A process that ends its parent when the parent is frozen:
`python -m trl_a3po.workers.watchdog_process SOCKET PARENT`, started by `Watchdog` alone.

Python code that holds the interpreter lock, such as `9**9**9` or a C function that never returns, stops every other
thread of its process, with all their timeouts, and Ctrl-C. So the parent's beats are awaited here.

Guarantees: a parent that has sent nothing for as long as its last note allows prints the stack of every thread on
standard error, a sentence follows that says what was running and what to set, and the parent is killed. After a
Ctrl-C, it is killed after `GRACE_SECONDS` of silence. Time during which the parent or the machine was stopped does not
count. This process ends when its parent ends, or closes the socket.
"""

import os
import select
import signal
import sys
import time
from dataclasses import dataclass

from trl_a3po.workers.channel import Channel
from trl_a3po.workers.process import is_stopped, parents_channel

GRACE_SECONDS = 5.0
TICK = 0.5  # seconds between two looks at the parent
PRINT_SECONDS = 1.0  # for the parent to print its stacks


@dataclass(frozen=True)
class Note:
    """What the parent does from now on.

    Args:
        limit: seconds of silence after which the parent is frozen.
        doing: completes "was frozen for 10 s ".
        remedy: a sentence that says what to set.
    """

    limit: float
    doing: str
    remedy: str


class Silence:
    """How long the parent has said nothing while it could have."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.interrupted = False

    def passed(self, seconds: float, *, heard: bool, stopped: bool) -> None:
        """Note that `seconds` have passed.

        Args:
            heard: the parent has sent something meanwhile.
            stopped: the parent is stopped, for instance by Ctrl-Z.
        """
        if heard:
            self.seconds, self.interrupted = 0.0, False
        elif not stopped:
            # A longer time is one during which this process, and so maybe the whole machine, was stopped.
            self.seconds += min(seconds, 2 * TICK)

    def is_over(self, limit: float) -> bool:
        """Whether it has lasted longer than `limit` seconds, or than `GRACE_SECONDS` if Ctrl-C was pressed."""
        return self.seconds > (min(limit, GRACE_SECONDS) if self.interrupted else limit)


def main() -> None:
    channel, parent = parents_channel(), int(sys.argv[2])
    errors, signals, stack_signal = channel.receive_one()
    note: Note = channel.receive_one()
    silence = Silence()
    while os.getppid() == parent:
        began = time.monotonic()
        messages, interrupted = _next(channel, signals)
        if messages is None:
            return
        note = next((message for message in reversed(messages) if message is not None), note)
        silence.passed(time.monotonic() - began, heard=bool(messages), stopped=not messages and is_stopped(parent))
        silence.interrupted |= interrupted
        if silence.is_over(note.limit):
            if stack_signal:
                os.kill(parent, stack_signal)
                time.sleep(PRINT_SECONDS)
            os.write(errors, report(note, silence).encode())
            os.kill(parent, signal.SIGKILL)
            return


def report(note: Note, silence: Silence) -> str:
    """What is printed about a frozen parent."""
    ctrl_c = ", and Ctrl-C was pressed" if silence.interrupted else ""
    return (
        f"\ntrl_a3po has ended the training process. It was frozen for {silence.seconds:.0f} s {note.doing}{ctrl_c}: "
        "something held Python's interpreter lock, so that nothing else could run and no timeout could end it. "
        f"{note.remedy}\n"
    )


def _next(channel: Channel, signals: int) -> tuple[list[Note | None] | None, bool]:
    """What the parent has sent within `TICK` seconds, or `None` at its end, and whether it was sent a SIGINT."""
    readable, _, _ = select.select([channel.fileno(), signals], [], [], TICK)
    interrupted = signals in readable and signal.SIGINT in os.read(signals, 4096)
    try:
        return channel.receive(), interrupted
    except EOFError:
        return None, interrupted


if __name__ == "__main__":
    main()
