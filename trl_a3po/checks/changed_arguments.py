"""Settings that are changed after the trainer was built.

TRL and this trainer copy many settings when the trainer is built. A later change would be followed by some readers and
not by others: the engine would sample at one temperature, and the loss would be computed at another.

Guarantees: a setting that is read while the trainer is built keeps its value, or `check` raises; settings that are
read each time they are used can be changed.
"""

import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from trl_a3po.config import A3POConfig
from trl_a3po.objectives.table import ObjectiveSettings

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer

# Settings of GRPOConfig that TRL's loss reads each time.
READ_BY_EACH_LOSS = (
    "delta",
    "entropy_coef_delta",
    "entropy_coef_max",
    "entropy_coef_min",
    "entropy_target",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
    "use_bias_correction_kl",
)
# Settings of TrainingArguments from which batches and the accelerator are made.
_READ_BY_TRAINER = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16")
# Attributes of the trainer that TRL's loss reads, and that the engine and the queue take from `args`.
_COPIES = ("temperature", "max_completion_length", "num_generations", "num_iterations")


def settings_read_once() -> list[str]:
    """The settings that are read while a trainer is built."""
    inherited = {field.name for field in fields(TrainingArguments)}
    followed = {field.name for field in fields(ObjectiveSettings)} | {*READ_BY_EACH_LOSS, "dry_run"}
    names = [field.name for field in fields(A3POConfig)]
    return [name for name in names if name not in inherited | followed or name in _READ_BY_TRAINER]


class SettingsOfConstruction:
    """The settings with which a trainer was built."""

    def __init__(self, args: A3POConfig):
        self._values = {name: _kept(getattr(args, name)) for name in settings_read_once()}

    def check(self, trainer: "A3POTrainer") -> None:
        """Raise `ValueError` for a setting that is no longer what it was when `trainer` was built."""
        for name, before in self._values.items():
            now = getattr(trainer.args, name)
            if now is not before and now != before:
                raise ValueError(_changed(f"args.{name}", before, now, name))
        for name in _COPIES:
            before, now = self._values[name], getattr(trainer, name)
            if now != before:
                raise ValueError(_changed(f"trainer.{name}", before, now, name))


def _kept(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def _changed(where: str, before: Any, now: Any, name: str) -> str:
    return (
        f"{where} was changed from {before!r} to {now!r} after the trainer was built, when {name} had been read "
        f"already: set it back to {before!r}, or build a new A3POTrainer with {name}={now!r}."
    )
