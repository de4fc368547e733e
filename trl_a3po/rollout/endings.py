"""How a take ends without a batch, besides `EngineError`, `RewardError` and `StallError`."""

from trl_a3po.errors import A3POError


class EndOfData(Exception):
    """Not an error: every take of the run has been handed out, or the prompts do not suffice for another batch."""


class QueueClosed(A3POError):
    """The queue was closed before or during the call."""


class GenerationFailed(A3POError):
    """A prompt failed as often as it may be tried."""


class StampError(A3POError):
    """A token's version cannot be true: older than what was published at its submission, or newer than the trainer."""
