"""Saving a run beside the `Trainer`'s checkpoint, and going on from there.

Guarantees: what is saved is one moment of the run, after an optimizer step: the queue, and, inside a generation batch,
the slices that are still to be trained with the micro-step to go on at; a run that goes on with other settings for
which rows and groups come when is refused by name.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from safetensors import SafetensorError
from transformers import TrainingArguments
from transformers.trainer_callback import TrainerState

from trl_a3po.distributed.team import Team
from trl_a3po.errors import A3POError, CheckpointError
from trl_a3po.rollout import checkpoint
from trl_a3po.rollout.outcomes import Outcomes
from trl_a3po.rollout.queue_state import QueueState, decode_state, encode_state

logger = logging.getLogger(__name__)

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, TypeError)  # of json, torch.save and safetensors


@dataclass(slots=True)
class RunState:
    """A run between two optimizer steps, without what the `Trainer` saves itself.

    Args:
        queue: the queue's state.
        micro_steps: micro-steps trained so far.
        publishes_counted_from: the version `weight_sync_steps` counts from.
        evaluation_noise: noise key of the next evaluation prompt, `None` for a new run's.
        slices: the generation batch in use, one entry per slice, `None` where it is not needed again; `None` between
            two batches.
        logs: the completions of that batch, as TRL's table shows them.
    """

    queue: QueueState
    micro_steps: int
    publishes_counted_from: int
    evaluation_noise: int | None = None
    slices: list[dict[str, Any] | None] | None = None
    logs: dict[str, Any] = field(default_factory=dict)


# --- saving -------------------------------------------------------------------------------------------------------


@contextmanager
def written_whole(team: Team, folder: Path, policy_version: int) -> Iterator[None]:
    """Inside, `folder` is being written, by every process of the run, and not valid; afterwards it is complete and
    says so.

    Raises:
        CheckpointError: something could not be written.
    """
    try:
        team.lead(lambda: checkpoint.begin(folder))
        yield
        team.barrier()
        team.lead(lambda: checkpoint.complete(folder, policy_version))
    except A3POError:
        raise
    except WRITE_ERRORS as error:
        raise CheckpointError(
            f"The checkpoint {folder} could not be written ({type(error).__name__}: {error}) and will not be resumed "
            "from; those saved before it are still valid. Free space or mend output_dir, then resume."
        ) from error


@contextmanager
def named_on_error(what: str, folder: str | Path) -> Iterator[None]:
    """Inside, `what` happens in `folder`.

    Raises:
        CheckpointError: something could not be written, or deleted.
    """
    try:
        yield
    except A3POError:
        raise
    except WRITE_ERRORS as error:
        raise CheckpointError(
            f"{what} failed in {folder} ({type(error).__name__}: {error}): free space or mend that folder, and try "
            "again."
        ) from error


@contextmanager
def rotation_held(args: TrainingArguments) -> Iterator[None]:
    """Inside, the `Trainer` deletes no older checkpoint: the new one is not valid yet."""
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        yield
    finally:
        args.save_total_limit = limit


def save_run(trainer, folder: Path) -> None:
    """Write the state of the trainer's run into `folder`: the queue by the main process, the slices of the batch in
    use by each process its own."""
    team, slices = trainer._team, _slices_left(trainer)
    if slices is not None:
        checkpoint.write_tensors(
            folder / checkpoint.batch_file(team.rank),
            {
                f"{number}/{name}": value.detach().clone()
                for number, part in enumerate(slices)
                for name, value in (part or {}).items()
                if value is not None
            },
        )
    team.lead(lambda: _save_queue(trainer, folder, slices))


def _save_queue(trainer, folder: Path, slices: list[dict[str, Any] | None] | None) -> None:
    session = trainer._session
    values, tensors = encode_state(session.queue.state())
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
            "settings": settings(trainer),
            "reward_funcs": trainer.reward_func_names,
            "queue": values,
            "slices": slices and [None if part is None else list(part) for part in slices],
            "logs": {} if slices is None else _logs(trainer),
        },
    )


def settings(trainer) -> dict[str, Any]:
    """What decides which prompts, groups and slices come when."""
    args, dataset = trainer.args, trainer.train_dataset
    return {
        "seed": args.seed,
        "shuffle_dataset": trainer.shuffle_dataset,
        "rows of train_dataset": None if isinstance(dataset, IterableDataset) else len(dataset),
        "generation_batch_size": args.generation_batch_size,
        "num_generations": args.num_generations,
        "steps_per_generation": args.steps_per_generation,
        "num_iterations": trainer.num_iterations,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
    }


def _slices_left(trainer) -> list[dict[str, Any] | None] | None:
    """The slices of the batch in use that a later micro-step needs, at their places; `None` between two batches."""
    micro_steps = trainer.args.micro_steps_per_take
    done = trainer._step % micro_steps
    if done == 0 or trainer._buffered_inputs is None:
        return None
    slices = trainer.args.steps_per_generation
    needed = {step % slices for step in range(done, micro_steps)}
    return [part if number in needed else None for number, part in enumerate(trainer._buffered_inputs)]


def _logs(trainer) -> dict[str, Any]:
    logs = {name: list(trainer._logs[name]) for name in ("prompt", "completion", "advantages")}
    return logs | {
        name: {column: list(values) for column, values in trainer._logs[name].items()} for name in ("rewards", "extra")
    }


# --- going on -----------------------------------------------------------------------------------------------------


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


def load_run(trainer, folder: Path) -> RunState:
    """What `save_run` wrote, for a trainer that is about to go on from `folder`.

    Raises:
        ValueError: the trainer's settings would bring other prompts or batches than those of the saved run.
    """
    if not checkpoint.is_ours(folder):
        return _plain_run(trainer, folder)
    values = checkpoint.read_json(folder / checkpoint.STATE)
    _check_settings(values["settings"], settings(trainer), folder)
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
        queue=replace(queue, next_take=takes),
        micro_steps=values["micro_steps"],
        publishes_counted_from=values["publishes_counted_from"],
        evaluation_noise=values["evaluation_noise"],
        logs=values["logs"],
    )
    if values["slices"] is not None:
        team = trainer._team
        if values["processes"] != team.size:
            raise ValueError(
                f"{folder} was saved inside a generation batch that {values['processes']} processes shared, and "
                f"{team.size} cannot go on with it: launch {values['processes']} processes, or resume from a step at "
                "which a new batch begins."
            )
        tensors = checkpoint.read_tensors(folder / checkpoint.batch_file(team.rank))
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
    return RunState(queue, micro_steps, publishes_counted_from=version)
