"""Resuming from a checkpoint: one that `saving` wrote, or, without groups, one of `GRPOTrainer`.

Guarantees: the run continues at the moment that was saved. No number of the checkpoint is used with a setting that
would have made another number: the number is made again, or an error names the setting (see `compared_settings`).
"""

import logging
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import IterableDataset
from transformers.trainer_callback import TrainerState

from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.saved_images import opened
from trl_a3po.checkpoints.saved_run import as_damage, read_run, read_slices
from trl_a3po.rollout.outcomes import Outcomes
from trl_a3po.rollout.queue_state import QueueState
from trl_a3po.session.compared_settings import changed_settings, compared_settings
from trl_a3po.session.restored_images import with_saved_images
from trl_a3po.session.saving import COUNTS, Slice

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunState:
    """A run between two optimizer steps, without what the `Trainer` saves itself.

    Args:
        run: the name of the run, `None` if its checkpoint does not give one.
        queue: the state of the queue.
        micro_steps: micro-steps trained so far.
        publishes_counted_from: the version from which `weight_sync_steps` is counted.
        evaluation_noise: noise key of the next evaluation prompt, `None` to begin with the first one.
        slices: the current generation batch, with `None` for each slice that is not needed again; `None` between two
            batches.
        logs: the completions of that batch, as TRL's table shows them.
    """

    run: str | None
    queue: QueueState
    micro_steps: int
    publishes_counted_from: int
    evaluation_noise: int | None = None
    slices: list[Slice | None] | None = None
    logs: dict[str, Any] = field(default_factory=dict)


def new_run() -> str:
    """The name of a run, which distinguishes its checkpoints and its lines of the timeline from those of others."""
    return uuid.uuid4().hex


def load_run(trainer: "A3POTrainer", folder: Path) -> RunState:
    """The run that was saved in `folder`, for a trainer that is about to resume it.

    Raises:
        ValueError: with the trainer's settings, other prompts or batches would follow than in the saved run.
    """
    if not checkpoint.is_ours(folder):
        return _plain_run(trainer, folder)
    saved = read_run(folder)
    with as_damage(folder):
        changed = changed_settings(saved.settings, compared_settings(trainer))
    _check_settings(changed, saved.slices is not None, folder)
    _check_processes(trainer, saved.processes, saved.slices is not None, folder)
    _check_data_skip(trainer, folder)
    queue = _made_again(saved.queue, changed, folder)
    if saved.images:
        with as_damage(folder):
            queue = with_saved_images(trainer, queue, opened(saved.images))
    if trainer.environment_factories:
        queue = queue.without_unscored_rollouts()
    takes = -(-saved.micro_steps // trainer.args.micro_steps_per_take)  # as this run's schedule counts them
    run = RunState(
        run=checkpoint.run_of(folder),
        queue=replace(queue, next_take=takes),
        micro_steps=saved.micro_steps,
        publishes_counted_from=saved.publishes_counted_from,
        evaluation_noise=saved.evaluation_noise,
        logs=saved.logs,
    )
    if saved.slices is not None:
        run.slices = read_slices(folder, trainer._team.rank, saved.slices)
    return run


def begin_run(trainer: "A3POTrainer", run: RunState | None) -> None:
    """Set the trainer to the micro-step and the half-used batch of `run`, or to the beginning of a new run."""
    # Otherwise the half-used batch of an interrupted run would be trained with the versions of that run.
    trainer._step, trainer._buffered_inputs = 0, None
    if run is None:
        return
    trainer._step = run.micro_steps
    if run.slices is not None:
        device = trainer.accelerator.device
        trainer._buffered_inputs = [part and _moved(part, device) for part in run.slices]
    for name, saved in run.logs.items():
        for column, values in saved.items() if isinstance(saved, dict) else [(None, saved)]:
            log = trainer._logs[name] if column is None else trainer._logs[name][column]
            log.clear()
            log.extend(values)
    if trainer._is_vlm and trainer.log_multimodal:  # images are not saved, but have a place for each prompt
        trainer._logs["images"].extend([None] * len(run.logs.get("prompt", ())))


def _moved(part: Slice, device: torch.device) -> Slice:
    return {
        name: value.tolist() if name in COUNTS else None if value is None else value.to(device)
        for name, value in part.items()
    }


def _check_settings(changed: dict[str, str], inside_a_batch: bool, folder: Path) -> None:
    """Raise `ValueError` for settings that have changed and with which numbers of the checkpoint cannot be made
    again."""
    if "order" in changed:
        raise ValueError(
            f"{folder} was saved with {changed['order']}: prompts and batches would follow in another order than in "
            "that run, and some would be trained twice or never. Resume with the settings of that run, or start a "
            "new run from its weights."
        )
    if "tokenizer" in changed:
        raise ValueError(
            f"{folder} was saved with {changed['tokenizer']}, in which its token ids mean other text: resume "
            "with the tokenizer of that run, or start a new run from its weights."
        )
    decided = [text for group, text in changed.items() if group in ("prompts", "sampling", "scoring", "batch")]
    if inside_a_batch and decided:
        raise ValueError(
            f"{folder} was saved inside a generation batch, which was made with {', '.join(decided)}: resume with the "
            "settings of that run, or from a checkpoint at which a new batch begins."
        )


def _made_again(queue: QueueState, changed: dict[str, str], folder: Path) -> QueueState:
    """The queue without what other settings would have made differently; a warning says what is made again."""
    sampled = ", ".join(changed[group] for group in ("prompts", "sampling") if group in changed)
    if sampled:
        logger.warning("%s was saved with %s: its finished groups are sampled again.", folder, sampled)
        return queue.without_rollouts(keeps_prompts="prompts" not in changed)
    if "scoring" in changed:
        logger.warning("%s was saved with %s: its finished groups are scored again.", folder, changed["scoring"])
        return replace(queue, outstanding=[replace(item, score=None) for item in queue.outstanding])
    return queue


def _check_processes(trainer: "A3POTrainer", saved: int, inside_a_batch: bool, folder: Path) -> None:
    """Raise `ValueError` if the number of processes has changed and the checkpoint is spread over the processes."""
    now = trainer._team.size
    if saved == now:
        return
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            f"{folder} was saved under DeepSpeed by {saved} processes, over which the optimizer's state is spread, "
            f"and {now} processes cannot resume it: launch {saved} processes, or start a new run from its weights."
        )
    if inside_a_batch:
        raise ValueError(
            f"{folder} was saved inside a generation batch that {saved} processes shared, and {now} processes cannot "
            f"resume it: launch {saved} processes, or resume from a step at which a new batch begins."
        )


def _check_data_skip(trainer: "A3POTrainer", folder: Path) -> None:
    """Raise `ValueError` for `ignore_data_skip` if an epoch ends with a short accumulation window: the `Trainer` would
    begin a new epoch at the checkpoint, and so move that window."""
    if not trainer.args.ignore_data_skip or isinstance(trainer.train_dataset, IterableDataset):
        return
    if len(trainer.get_train_dataloader()) % trainer.args.gradient_accumulation_steps:
        raise ValueError(
            f"ignore_data_skip=True moves the end of the epoch, where fewer than gradient_accumulation_steps="
            f"{trainer.args.gradient_accumulation_steps} micro-steps are left, away from where {folder} expects it: "
            "leave ignore_data_skip=False, which costs no time here, because rows are skipped without being read."
        )


def _plain_run(trainer: "A3POTrainer", folder: Path) -> RunState:
    """The run of a checkpoint that `GRPOTrainer` wrote. It has no groups, and its prompts continue where
    `GRPOTrainer` would continue.

    Raises:
        ValueError: the checkpoint was saved inside a generation batch, which it does not hold.
    """
    args, version = trainer.args, TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step
    _check_data_skip(trainer, folder)
    micro_steps = version * args.gradient_accumulation_steps
    if not isinstance(trainer.train_dataset, IterableDataset):
        per_epoch = len(trainer.get_train_dataloader())
        epochs, steps = divmod(version, -(-per_epoch // args.gradient_accumulation_steps))
        micro_steps = epochs * per_epoch + steps * args.gradient_accumulation_steps
    takes, inside = divmod(micro_steps, args.micro_steps_per_take)
    if inside:
        raise ValueError(
            f"{folder} was not saved by an A3POTrainer, and step {version} lies inside a generation batch, whose "
            "completions it does not hold: resume from a step at which a new batch begins."
        )
    logger.warning(
        "%s was not saved by an A3POTrainer: the queue starts empty, and the prompts continue at row %d, where a run "
        "with the present settings would be.",
        folder,
        takes * args.groups_per_take,
    )
    queue = QueueState(
        next_take=takes,
        cursor=takes * args.groups_per_take,
        published_version=version,
        last_taken_version=0,
        rejected_in_a_row=0,
        outcomes=Outcomes(0, 0, {}, {}, 0, 0),
        outstanding=[],
    )
    return RunState(new_run(), queue, micro_steps, publishes_counted_from=version)
