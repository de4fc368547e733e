"""The names that a script imports: `GRPOTrainer` and its config, or `A3POTrainer` and its own, small and quick.

Guarantees: both trainers get the same completions for the same prompts, those of the stub engine; the configs of both
differ in nothing but `max_staleness`.
"""

from dataclasses import dataclass, field

import trl

import trl_a3po
from tests.runs import COMPLETE, ScriptedGRPOTrainer


@dataclass
class Quick:
    use_cpu: bool = True
    bf16: bool | None = False
    use_bias_correction_kl: bool = False  # a default in which A3POConfig differs
    report_to: None | str | list[str] = "none"  # noqa: RUF036  # as TrainingArguments has it, which its parser needs
    disable_tqdm: bool | None = True
    gradient_checkpointing: bool = False
    per_device_train_batch_size: int = 4
    per_device_eval_batch_size: int = 4
    gradient_accumulation_steps: int = 2
    num_generations: int | None = 4
    max_completion_length: int | None = 8
    max_steps: int = 3
    logging_steps: float = 1
    save_strategy: str = "no"
    learning_rate: float = 0.02
    optim: str = "sgd"
    lr_scheduler_type: str = "constant"


@dataclass
class GRPOConfig(Quick, trl.GRPOConfig):
    pass


@dataclass
class FreshConfig(Quick, trl_a3po.A3POConfig):
    max_staleness: int = 0
    delivery_check_steps: int = 0


@dataclass
class StaleConfig(Quick, trl_a3po.A3POConfig):
    delivery_check_steps: int = field(default=0)


class GRPOTrainer(ScriptedGRPOTrainer):
    """It keeps the prompts of training in `trained_on`, one for each group."""

    trained_on: list[tuple[int, ...]]

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.model.training:
            GRPOTrainer.trained_on += [tuple(ids) for ids in prompt_ids[:: self.num_generations]]
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)


class A3POTrainer(trl_a3po.A3POTrainer):
    """As `GRPOTrainer` here, with the engine's completions in an evaluation outside of training, too."""

    trained_on: list[tuple[int, ...]]
    complete = staticmethod(COMPLETE)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._running:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return ScriptedGRPOTrainer._generate_single_turn(self, prompt_ids)

    def _take(self):
        rows = super()._take()
        A3POTrainer.trained_on += [tuple(group.prompt.token_ids) for group, n in self._current_batch.rows if n == 0]
        return rows
