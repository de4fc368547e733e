"""The errors of the engine, rewards, queue, checkpoints and processes of a run. Each message says what happened, to
what, and what to do.

Settings, data and arguments that cannot be used raise `ValueError` or `TypeError`: before generation starts, where
this can be known by then.
"""


class A3POError(RuntimeError):
    """Base class of the errors that are raised while a run is under way.

    `train` has then stopped generating and has closed the engine and the reward workers. Checkpoints saved before the
    error stay valid: fix the cause, and call `train` with `resume_from_checkpoint=True`.
    """


class EngineError(A3POError):
    """The engine cannot sample any more, or has returned something that is not a valid group.

    Raised when the engine cannot start, when an error ends its worker before any group is finished, when its worker
    has died more often than `engine_restarts` allows, when no vLLM server could sample for `vllm_outage_timeout`
    seconds, or when the engine has not answered in time. The message includes the last output of the worker: look for
    the cause there. A run that is resumed from a checkpoint samples the prompts again that were in the engine.
    """


class DeliveryError(EngineError):
    """The engine does not sample from the weights that were published to it.

    Raised by the delivery check at the start of a run and after a publish, when the log-probs of the engine do not
    follow those of the trainer, and during the run, when the two differ by more than `max_engine_gap`. Training is
    stopped rather than continued on rollouts of the wrong policy. The message gives the measured gaps and what usually
    causes them. `delivery_check_steps=0` turns the delivery check off.
    """


class RewardError(A3POError):
    """A reward function or `on_group` raised or returned something that cannot be used, or a batch has no reward.

    Raised when a reward function raises, returns something else than one finite number or `None` per completion, or
    cannot be run in a reward worker; when `on_group` raises or returns a group that cannot be trained on; and when no
    completion of a batch received a reward. The exception of the function, if there is one, is the cause. Correct the
    function, then resume from the last checkpoint, which also holds the groups that had been sampled and not yet
    trained on.
    """


class StallError(A3POError):
    """A wait has reached its timeout, or no batch can be filled.

    Raised after `stall_timeout` seconds without any event, when a reward function takes longer than `reward_timeout`
    in a thread, when more than `max_rejected_groups_in_a_row` groups in a row are rejected, or when the settings make
    a batch impossible to fill. The message says what waits for what, how many groups are in each stage, and where
    every thread is. If the work only needs longer, raise the timeout that the message names.
    """


class CheckpointError(A3POError):
    """A checkpoint or a model could not be written, or an older checkpoint could not be deleted.

    A checkpoint that was being written is never taken for a valid one, and the checkpoints before it are still valid.
    Free space on the disk, or make the folder writable, and resume.
    """


class TeamError(A3POError):
    """Another process of a run with several processes has failed, or has stopped answering.

    Raised in the processes that did not fail, so that they end instead of waiting. The cause is in the output of the
    process that failed. Checkpoints saved before are still valid.
    """


class QueueClosed(A3POError):
    """The queue was closed before or during a call that needs it open.

    Raised when something is taken from the queue or published to it after training has ended. The groups that were
    left are counted as unused.
    """


class GenerationFailed(A3POError):
    """A prompt failed `max_attempts` times, or a group was rejected that cannot be replaced.

    The message lists why each attempt failed. With `schedule="fixed_lag"`, a rejected group cannot be replaced,
    because a batch is sampled as a whole. Remove or shorten the prompt, or raise `max_attempts`, and resume.
    """


class StampError(A3POError):
    """The engine stamped a token with a policy version that cannot be true.

    Raised for a version that is below -1, older than the version that was published when the prompt was submitted, or
    newer than the trainer's. The loss would correct for the wrong staleness, so no such token is trained on. This is
    an error of the engine: report it, or correct your own engine (see `trl_a3po.protocol.engine`).
    """


class Terminated(SystemExit):
    """The process received SIGTERM, and the run has ended in order.

    Raised by `train` after the checkpoint has been saved and the engine and the reward workers have been closed. It is
    no `A3POError`: nothing has failed. A script that does not catch it ends with exit code 75 (`EX_TEMPFAIL` of
    `sysexits.h`: try again later). The run goes on with `resume_from_checkpoint=True`.
    """

    exit_code = 75

    def __init__(self, message: str) -> None:
        super().__init__(self.exit_code)
        self.message = message

    def __str__(self) -> str:
        return self.message
