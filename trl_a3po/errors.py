"""Errors a user can meet. Each message says what happened, to what, and what to do about it."""


class A3POError(RuntimeError):
    """Base of the errors raised while a run is under way."""


class EngineError(A3POError):
    """The engine cannot sample any more."""


class DeliveryError(EngineError):
    """The engine does not sample from the weights that were published to it."""


class RewardError(A3POError):
    """A reward function raised, or returned something that is not one number per completion, or cannot be run in a
    reward worker; or `on_group` did the like."""


class StallError(A3POError):
    """A wait reached its limit. The message says who waits for whom."""


class CheckpointError(A3POError):
    """A checkpoint could not be written. Those written before it are still valid."""


class TeamError(A3POError):
    """Another process of the run died, or stopped answering."""


class QueueClosed(A3POError):
    """The queue was closed before or during the call."""


class GenerationFailed(A3POError):
    """A prompt failed as often as it may be tried."""


class StampError(A3POError):
    """A token's version cannot be true: older than what was published at its submission, or newer than the trainer."""
