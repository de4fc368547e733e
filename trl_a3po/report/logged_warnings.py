"""The warnings of a run, in its timeline.

Guarantees: each text once, and no more than `MOST` of them; logging is not changed otherwise.
"""

import logging

from trl_a3po.report.timeline import Timeline

MOST = 100


class LoggedWarnings(logging.Handler):
    """Appends a line `warning` for each warning that this package logs, until it is closed.

    Args:
        timeline: of the run.
    """

    def __init__(self, timeline: Timeline):
        super().__init__(logging.WARNING)
        self._timeline = timeline
        self._seen: set[str] = set()
        logging.getLogger("trl_a3po").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if logging.lastResort is not None and self._is_only_handler():
            logging.lastResort.handle(record)
        text = record.getMessage()
        if len(self._seen) < MOST and text not in self._seen:
            self._seen.add(text)
            self._timeline.write("warning", text=text)

    def close(self) -> None:
        logging.getLogger("trl_a3po").removeHandler(self)
        super().close()

    def _is_only_handler(self) -> bool:
        """Logging prints the warnings of a logger to stderr if it has no handler, as it would be without this one."""
        logger = logging.getLogger("trl_a3po")
        return logger.handlers == [self] and not (logger.propagate and logging.getLogger().handlers)
