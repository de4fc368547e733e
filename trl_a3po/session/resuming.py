"""Going on from a checkpoint: the run that `saving` wrote, or, without groups, one of `GRPOTrainer`.

Guarantees: the run goes on at the moment that was saved; one that goes on with other settings for which rows and
groups come when is refused by name.
"""

import logging
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from transformers.trainer_callback import TrainerState

from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.queue_codec import decode_state
from trl_a3po.rollout.outcomes import Outcomes
from trl_a3po.rollout.queue_state import QueueState
from trl_a3po.session.saving import settings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunState:
    """A run between two optimizer steps, without what the `Trainer` saves itself.

    Args:
        run: the name it goes on under; `None` of one from before runs had names.
        queue: the queue's state.
        micro_steps: micro-steps trained so far.
        publishes_counted_from: the version `weight_sync_steps` counts from.
        evaluation_noise: noise key of the next evaluation prompt, `None` for a new run's.
        slices: the generation batch in use, one entry per slice, `None` where it is not needed again; `None` between
            two batches.
        logs: the completions of that batch, as TRL's table shows them.
    """

    run: str | None
    queue: QueueState
    micro_steps: int
    publishes_counted_from: int
    evaluation_noise: int | None = None
    slices: list[dict[str, Any] | None] | None = None
    logs: dict[str, Any] = field(default_factory=dict)


def choose_checkpoint(resume_from_checkpoint: bool | str, output_dir: str) -> Path:
    """The folder to resume from: the newest valid one for `True`, or the one given.

    Raises:
        ValueError: there is none, or the one given was not written whole.
    """
    if resume_from_checkpoint is True:
        return checkpoint.newest_valid(Path(output_dir))
    folder = Path(resume_from_checkpoint)
    problem = checkpoint.why_invalid(folder)
    plain = folder.is_dir() and not checkpoint.is_ours(folder) and (folder / "trainer_state.json").is_file()
    if problem is not None and not plain:
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} {problem}: give the path of a valid checkpoint, or True for the "
            "newest valid one in output_dir."
        )
    return folder


def warn_of_earlier_runs(output_dir: str) -> None:
    """Say that a run which starts from the beginning shares `output_dir` with checkpoints of earlier ones."""
    found = [path.name for path in checkpoint.checkpoints(Path(output_dir)) if checkpoint.why_invalid(path) is None]
    if found:
        logger.warning(
            "output_dir=%r holds %s of an earlier run, and this one starts from the beginning, as "
            "resume_from_checkpoint is not set. Until it has saved a checkpoint of its own, "
            "resume_from_checkpoint=True goes on with the earlier run: set another output_dir to keep the two apart.",
            output_dir,
            ", ".join(found),
        )


def new_run() -> str:
    """The name of a run, by which its checkpoints and its lines of the timeline are told from another's."""
    return uuid.uuid4().hex


def load_run(trainer, folder: Path) -> RunState:
    """What `save_run` wrote, for a trainer that is about to go on from `folder`.

    Raises:
        ValueError: the trainer's settings would bring other prompts or batches than those of the saved run.
    """
    if not checkpoint.is_ours(folder):
        return _plain_run(trainer, folder)
    values = checkpoint.read_json(folder / checkpoint.STATE)
    _check_settings(values["settings"], settings(trainer), folder)
    _check_processes(trainer, values["processes"], values["slices"] is not None, folder)
    _check_data_skip(trainer, folder)
    queue = decode_state(values["queue"], checkpoint.read_tensors(folder / checkpoint.GROUPS))
    if values["reward_funcs"] != trainer.reward_func_names:
        logger.warning(
            "%s was saved with the reward functions %s: its groups are scored again, with %s.",
            folder,
            ", ".join(values["reward_funcs"]),
            ", ".join(trainer.reward_func_names),
        )
        queue = replace(queue, outstanding=[replace(item, score=None) for item in queue.outstanding])
    takes = -(-values["micro_steps"] // trainer.args.micro_steps_per_take)  # as this run's schedule counts them
    run = RunState(
        run=checkpoint.run_of(folder),
        queue=replace(queue, next_take=takes),
        micro_steps=values["micro_steps"],
        publishes_counted_from=values["publishes_counted_from"],
        evaluation_noise=values["evaluation_noise"],
        logs=values["logs"],
    )
    if values["slices"] is not None:
        tensors = checkpoint.read_tensors(folder / checkpoint.batch_file(trainer._team.rank))
        run.slices = [
            None if names is None else {name: tensors.get(f"{number}/{name}") for name in names}
            for number, names in enumerate(values["slices"])
        ]
    return run


def begin_run(trainer, run: RunState | None) -> None:
    """Set the trainer to the micro-step and the half-used batch of `run`, or to a run's beginning."""
    # Without this, half-used batches of an interrupted run would be trained with the versions of that run.
    trainer._step, trainer._buffered_inputs = 0, None
    if run is None:
        return
    trainer._step = run.micro_steps
    if run.slices is not None:
        device = trainer.accelerator.device
        trainer._buffered_inputs = [
            part and {name: None if value is None else value.to(device) for name, value in part.items()}
            for part in run.slices
        ]
    for name, saved in run.logs.items():
        for column, values in saved.items() if isinstance(saved, dict) else [(None, saved)]:
            log = trainer._logs[name] if column is None else trainer._logs[name][column]
            log.clear()
            log.extend(values)


def _check_settings(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    changed = [name for name in now if now[name] != saved[name]]
    if changed:
        raise ValueError(
            f"{folder} was saved with "
            + ", ".join(f"{name}={saved[name]!r} (now {now[name]!r})" for name in changed)
            + ": prompts and batches would not come as in that run, and some would be trained twice or never. Resume "
            "with the settings of that run, or start a new one from its weights."
        )


def _check_processes(trainer, saved: int, inside_a_batch: bool, folder: Path) -> None:
    """Another number of processes goes on where nothing lies spread over them."""
    now = trainer._team.size
    if saved == now:
        return
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            f"{folder} was saved under DeepSpeed by {saved} processes, over which the optimizer's state is spread, "
            f"and {now} cannot go on with it: launch {saved} processes, or start a new run from its weights."
        )
    if inside_a_batch:
        raise ValueError(
            f"{folder} was saved inside a generation batch that {saved} processes shared, and {now} cannot go on with "
            f"it: launch {saved} processes, or resume from a step at which a new batch begins."
        )


def _check_data_skip(trainer, folder: Path) -> None:
    """`ignore_data_skip` begins a new epoch at the checkpoint and moves the short accumulation window at its end."""
    if not trainer.args.ignore_data_skip or isinstance(trainer.train_dataset, IterableDataset):
        return
    if len(trainer.get_train_dataloader()) % trainer.args.gradient_accumulation_steps:
        raise ValueError(
            f"ignore_data_skip=True moves the end of the epoch, where fewer than gradient_accumulation_steps="
            f"{trainer.args.gradient_accumulation_steps} micro-steps are left, away from where {folder} expects it: "
            "leave it False. Rows are not read to skip them."
        )


def _plain_run(trainer, folder: Path) -> RunState:
    """A checkpoint that `GRPOTrainer` wrote: no groups, and the prompts go on where its sampler would.

    Raises:
        ValueError: it was saved inside a generation batch, which is lost.
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
        "%s was not saved by an A3POTrainer: the queue starts empty, and the prompts go on at row %d, where a run "
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
