"""The stack of every thread, for error reports. Imports nothing heavy, because reward workers import it too."""

import sys
import threading
import traceback


def thread_stacks() -> str:
    """The stack of every thread of this process, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"stack of {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )
