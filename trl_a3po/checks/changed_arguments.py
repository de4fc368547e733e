"""Settings that are changed after the trainer was built.

TRL and this trainer copy many settings when the trainer is built. A later change would be followed by some readers and
not by others: the engine would sample at one temperature, and the loss would be computed at another.

Guarantees: a setting is read while the trainer is built, when `train()` begins, or each time it is used. One that has
been read keeps its value until it is read again, or an error names it: for the first kind as long as the trainer
lives, for the second kind as long as the run goes on, at the next micro-step.
"""

import copy
from collections.abc import Iterable
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
# Settings from which each `train()` builds its engine, its queue and its scorer.
READ_BY_EACH_TRAINING = (
    "max_staleness",
    "weight_sync_steps",
    "max_attempts",
    "engine_device",
    "engine_slots",
    "engine_threads",
    "engine_restarts",
    "delivery_check_steps",
    "max_engine_gap",
    "vllm_weight_transfer",
    "vllm_weights_dir",
    "vllm_python",
    "vllm_outage_timeout",
    "reward_workers",
    "reward_timeout",
    "reward_on_timeout",
    "drop_zero_variance_groups",
    "max_rejected_groups_in_a_row",
    "stall_timeout",
    "kept_rollouts",
    "proximal_method",
    "fresh_proximal",
    "seed",
)
# Settings of TrainingArguments from which batches and the accelerator are made.
_READ_BY_TRAINER = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16")
# Attributes of the trainer from which each `train()` builds its scorer and its queue, with what to do instead.
_FUNCTIONS = {
    "reward_funcs": "let a function look at trainer_state.global_step, or change trainer.reward_weights",
    "on_group": "let the function look at trainer.state.global_step",
}
# Attributes of the trainer that TRL's loss reads, and that the engine and the queue take from `args`.
_COPIES = ("temperature", "max_completion_length", "num_generations", "num_iterations")


def settings_read_once() -> list[str]:
    """The settings that are read while a trainer is built."""
    inherited = {field.name for field in fields(TrainingArguments)}
    followed = {field.name for field in fields(ObjectiveSettings)}
    followed |= {*READ_BY_EACH_LOSS, *READ_BY_EACH_TRAINING, "dry_run"}
    names = [field.name for field in fields(A3POConfig)]
    return [name for name in names if name not in inherited | followed or name in _READ_BY_TRAINER]


class SettingsInUse:
    """The settings with which a trainer was built, and those with which its training began."""

    def __init__(self, args: A3POConfig):
        self._built = _values(args, settings_read_once())
        self._begun: dict[str, Any] = {}
        self._functions: dict[str, list[Any]] = {}  # those of `_FUNCTIONS`, of the training
        self._max_steps: int | None = None  # of the training, once its queue has been planned

    def begin_training(self, trainer: "A3POTrainer") -> None:
        """Begin a `train()` call with the settings as they are now.

        Raises:
            ValueError: a setting that was read while `trainer` was built has changed, or one that has changed cannot
                be run with.
        """
        self._check_built(trainer)
        before, now = self._begun, _values(trainer.args, READ_BY_EACH_TRAINING)
        if before and before != now:
            trainer.args.check()
        self._begun, self._max_steps = now, None
        self._functions = {name: _functions(trainer, name) for name in _FUNCTIONS}

    def check(self, trainer: "A3POTrainer") -> None:
        """Raise `ValueError` for a setting that has changed since the training began and was read before."""
        self._check_built(trainer)
        for name, before in self._begun.items():
            now = getattr(trainer.args, name)
            if _differ(before, now):
                raise ValueError(
                    f"args.{name} was changed from {before!r} to {now!r} during training, which began with "
                    f"{before!r}: set it back, and set {name}={now!r} before the next train()."
                )
        for name, functions in self._functions.items():
            if [*map(id, _functions(trainer, name))] != [*map(id, functions)]:
                raise ValueError(
                    f"trainer.{name} was changed during training, which goes on with what it was at the beginning: "
                    f"{_FUNCTIONS[name]}, or set {name} before train()."
                )
        now, before = trainer.state.max_steps, self._max_steps
        if before is not None and now > before:
            raise ValueError(
                f"state.max_steps was raised from {before} to {now} during training, but generation is planned for "
                f"{before} steps: set max_steps={now} before train(). It may be lowered."
            )
        self._max_steps = trainer.state.max_steps if before is None else before

    def _check_built(self, trainer: "A3POTrainer") -> None:
        for name, before in self._built.items():
            now = getattr(trainer.args, name)
            if _differ(before, now):
                raise ValueError(_changed(f"args.{name}", before, now, name))
        for name in _COPIES:
            before, now = self._built[name], getattr(trainer, name)
            if now != before:
                raise ValueError(_changed(f"trainer.{name}", before, now, name))


def _functions(trainer: "A3POTrainer", name: str) -> list[Any]:
    value = getattr(trainer, name)
    return list(value) if isinstance(value, list) else [value]


def _values(args: A3POConfig, names: Iterable[str]) -> dict[str, Any]:
    return {name: _kept(getattr(args, name)) for name in names}


def _differ(before: Any, now: Any) -> bool:
    return now is not before and bool(now != before)


def _kept(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def _changed(where: str, before: Any, now: Any, name: str) -> str:
    return (
        f"{where} was changed from {before!r} to {now!r} after the trainer was built, when {name} had been read "
        f"already: set it back to {before!r}, or build a new A3POTrainer with {name}={now!r}."
    )
