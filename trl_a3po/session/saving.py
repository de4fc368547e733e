"""Saving a run beside the `Trainer`'s checkpoint.

Guarantees: what is saved is one moment of the run, after an optimizer step: the queue, and, inside a generation batch,
the slices that are still to be trained with the micro-step to go on at; a folder counts as a checkpoint only when all
of it is written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from safetensors import SafetensorError
from transformers import TrainingArguments

from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.queue_codec import encode_state
from trl_a3po.errors import A3POError, CheckpointError

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError, TypeError)  # of json, torch.save and safetensors


@contextmanager
def written_whole(trainer, folder: Path) -> Iterator[None]:
    """Inside, `folder` is being written, by every process of the run, and not valid; afterwards it is complete and
    says so.

    Raises:
        CheckpointError: something could not be written.
    """
    team, policy_version = trainer._team, trainer.state.global_step
    try:
        team.run_on_main(lambda: checkpoint.begin(folder))
        yield
        team.barrier()
        team.run_on_main(lambda: checkpoint.complete(folder, policy_version, trainer._session.run))
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
    team.run_on_main(lambda: _save_queue(trainer, folder, slices))


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


def _save_queue(trainer, folder: Path, slices: list[dict[str, Any] | None] | None) -> None:
    session = trainer._session
    values, tensors = encode_state(session.queue.state())
    session.timeline.write("checkpoint", version=trainer.state.global_step)
    session.timeline.flush()
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
