"""The part of a traceback that belongs to the user: what a function of the user did after this package called it.

Guarantees: in a reward worker too, a line of the script is shown with its file and its text.
"""

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

PACKAGE = str(Path(__file__).parents[1]) + os.sep
UNPICKLED = "<dynamic-code>"  # cloudpickle's name for the file of a function of the script


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """`trace` from the first frame outside of this package on; `None` if there is none."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
        trace = trace.tb_next
    return trace


def users_traceback(error: BaseException, script: str | None) -> str:
    """`error` as a traceback of the user's frames alone, with `script` as the file of what was unpickled."""
    told = traceback.TracebackException(type(error), error, users_frames(error.__traceback__))
    if script is not None:
        told.stack = traceback.StackSummary.from_list(
            [
                (script, frame.lineno or 0, frame.name, None) if frame.filename == UNPICKLED else frame
                for frame in told.stack
            ]
        )
    return "".join(told.format()).rstrip()


def script_file() -> str | None:
    """The file of the script that this process runs; `None` in a notebook."""
    return vars(sys.modules["__main__"]).get("__file__")
