"""The end of a run that has failed: what the run holds is closed, and the user sees what has failed.

Guarantees: the error that the user sees is the one that ended the run, not one of the clean-up after it; if a function
of the user's own raised it, the last frame of the traceback is the line that raised.
"""

import logging
from collections.abc import Callable

from trl_a3po.errors import A3POError
from trl_a3po.rewards.users_frames import users_frames
from trl_a3po.rewards.worker_process import RewardTraceback

logger = logging.getLogger(__name__)


def close_after_error(close: Callable[[], None]) -> None:
    """Call `close` while an error is on its way to the user. An error of `close` is logged."""
    try:
        close()
    except Exception:
        logger.exception("Cleaning up after the error that ended the run has failed as well.")


def end_with_users_line(error: BaseException) -> None:
    """Let the traceback of `error` end with the frames of the user's function that has caused it, in another thread or
    process."""
    cause = error
    while isinstance(cause, A3POError) and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is error:
        return
    if isinstance(cause, RewardTraceback):  # the frames of another process exist as text only
        error.add_note(str(cause))
        return
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is not None:
        last.tb_next = users_frames(cause.__traceback__)
