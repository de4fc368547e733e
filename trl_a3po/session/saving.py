"""Saving a run beside the `Trainer`'s checkpoint.

Guarantees: what is saved is one moment of the run, after an optimizer step. It holds the queue and, inside a
generation batch, the slices that are still to be trained on and the micro-step to continue with.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.utils import strip_images_from_messages

from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.queue_codec import encode_state
from trl_a3po.session.compared_settings import compared_settings

if TYPE_CHECKING:
    from trl_a3po.session.checkpoint_hooks import CheckpointHooks

Slice = dict[str, Any]  # of a generation batch: what one micro-step trains on, by name
COUNTS = ("num_images", "num_tiles")  # its lists of numbers, beside tensors


def save_run(trainer: "CheckpointHooks", folder: Path) -> None:
    """Write the state of the trainer's run into `folder`. The main process writes the queue, and every process its own
    slices of the current generation batch."""
    team, slices = trainer._team, _slices_left(trainer)
    if slices is not None:
        checkpoint.write_tensors(
            folder / checkpoint.batch_file(team.rank),
            {
                f"{number}/{name}": torch.tensor(value) if name in COUNTS else value.detach().clone()
                for number, part in enumerate(slices)
                for name, value in (part or {}).items()
                if value is not None
            },
        )
    team.run_on_main(lambda: _save_queue(trainer, folder, slices))


def _save_queue(trainer: "CheckpointHooks", folder: Path, slices: list[Slice | None] | None) -> None:
    session = trainer._session
    assert session is not None, "the main process has a session during training"
    values, tensors = encode_state(session.queue.state())
    for log in session.logs:
        log.write("checkpoint", version=trainer.state.global_step)
        log.flush()
    checkpoint.write_tensors(folder / checkpoint.GROUPS, tensors)
    checkpoint.write_json(
        folder / checkpoint.STATE,
        {
            "format": checkpoint.FORMAT,
            "policy_version": trainer.state.global_step,
            "micro_steps": trainer._step,
            "processes": trainer._team.size,
            "evaluation_noise": session.evaluation_noise,
            "publishes_counted_from": session.publishes_counted_from,
            "settings": compared_settings(trainer),
            "queue": values,
            "slices": slices and [None if part is None else list(part) for part in slices],
            "logs": {} if slices is None else _logs(trainer),
        },
    )


def _slices_left(trainer: "CheckpointHooks") -> list[Slice | None] | None:
    """The slices of the current generation batch, with `None` for those that no later micro-step needs; `None` between
    two batches."""
    micro_steps = trainer.args.micro_steps_per_take
    done = trainer._step % micro_steps
    if done == 0 or trainer._buffered_inputs is None:
        return None
    slices = trainer.args.steps_per_generation
    needed = {step % slices for step in range(done, micro_steps)}
    return [part if number in needed else None for number, part in enumerate(trainer._buffered_inputs)]


def _logs(trainer: "CheckpointHooks") -> dict[str, Any]:
    logs = {name: list(trainer._logs[name]) for name in ("prompt", "completion", "advantages")}
    for name in ("prompt", "completion"):
        logs[name] = list(map(strip_images_from_messages, logs[name]))
    return logs | {
        name: {column: list(values) for column, values in trainer._logs[name].items()} for name in ("rewards", "extra")
    }
