"""Closing what a run holds after the run has failed.

Guarantees: the error that the user sees is the one that ended the run, not one of the clean-up after it.
"""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


def close_after_error(close: Callable[[], None]) -> None:
    """Call `close` while an error is on its way to the user. An error of `close` is logged."""
    try:
        close()
    except Exception:
        logger.exception("Cleaning up after the error that ended the run has failed as well.")
