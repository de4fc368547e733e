"""The run that a checkpoint holds, read from its files.

Guarantees: what is returned has the fields, types and lengths that this package writes; anything else, whoever wrote
it, is a `ValueError` that names the folder. Nothing is unpickled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from safetensors import SafetensorError

from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.queue_codec import decode_state
from trl_a3po.checkpoints.saved_images import files_in
from trl_a3po.rollout.queue_state import QueueState

Count = Annotated[int, msgspec.Meta(ge=0)]
DAMAGE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    OverflowError,
    StopIteration,
    SafetensorError,
)
"""What Python, json, msgspec, torch and safetensors raise for a file that holds something else."""


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run at a checkpoint, as its main process wrote it.

    Args:
        policy_version: optimizer steps trained.
        micro_steps: micro-steps trained.
        processes: how many processes wrote it.
        evaluation_noise: noise key of the next evaluation prompt.
        publishes_counted_from: the version from which `weight_sync_steps` is counted.
        settings: what decided its numbers, by group and name.
        queue: the state of the queue.
        slices: the tensors of each slice of the current generation batch, `None` for a slice that is not needed again;
            `None` between two batches.
        logs: the completions of that batch.
        images: of the episodes in the queue, as files of PNG.
    """

    policy_version: Count
    micro_steps: Count
    processes: Annotated[int, msgspec.Meta(ge=1)]
    evaluation_noise: Count
    publishes_counted_from: Count
    settings: dict[str, dict[str, Any]]
    queue: QueueState
    slices: list[list[str] | None] | None
    logs: dict[str, list[Any] | dict[str, list[Any]]]
    images: list[bytes]


def read_run(folder: Path) -> SavedRun:
    """The run in `folder`.

    Raises:
        ValueError: a file cannot be read, or does not hold what this package writes.
    """
    with as_damage(folder):
        values = checkpoint.read_json(folder / checkpoint.STATE)
        tensors = checkpoint.read_tensors(folder / checkpoint.GROUPS)
        queue = decode_state(values["queue"], tensors)
        plain = {name: value for name, value in values.items() if name != "format"}
        run = SavedRun(**{**plain, "queue": queue}, images=files_in(tensors))
        msgspec.convert(msgspec.to_builtins(run, str_keys=False), SavedRun)  # checks every type
        return run


def read_slices(folder: Path, rank: int, slices: list[list[str] | None]) -> list[dict[str, Any] | None]:
    """The slices of process `rank`. Raises `ValueError` as `read_run` does."""
    with as_damage(folder):
        tensors = checkpoint.read_tensors(folder / checkpoint.batch_file(rank))
        return [
            None if names is None else {name: tensors.get(f"{number}/{name}") for name in names}
            for number, names in enumerate(slices)
        ]


@contextmanager
def as_damage(folder: Path) -> Iterator[None]:
    """Around code that reads our files of `folder`: what it raises becomes a `ValueError` that says so."""
    try:
        yield
    except DAMAGE as error:
        raise ValueError(
            f"{folder} cannot be resumed: its files {checkpoint.STATE} and {checkpoint.GROUPS} do not hold what this "
            f"version of trl_a3po writes ({type(error).__name__}: {str(error)[:200]}). Resume from another checkpoint."
        ) from error
