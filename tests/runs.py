"""Runs on the tiny model that several test files share: one builder for both trainers, and `GRPOTrainer` fed with the
completions of the stub engine, so that it is the oracle of what a feature does."""

from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.reward import reward
from tests.tiny import VOCAB, tiny_prompts
from tests.workers.processes import until
from trl_a3po import A3POConfig, A3POTrainer, Group
from trl_a3po.testing import StubEngine, scripted_completion

GENERATIONS, LENGTH = 4, 8
COMPLETE = scripted_completion(VOCAB, LENGTH)
EOS = 1

TRAINER_ARGUMENTS = (
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "reward_processing_classes",
    "callbacks",
    "optimizers",
    "peft_config",
    "quantization_config",
    "on_group",
    "tools",
    "rollout_func",
    "environment_factory",
)


def complete_or_stop(prompt_ids, rollout: int) -> list[int]:
    """As `COMPLETE`, with a stop token at the end of every other completion."""
    token_ids = COMPLETE(prompt_ids, rollout)
    return [*token_ids[:-1], EOS] if rollout % 2 else token_ids


class ScriptedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose completions are those of the stub engine; it keeps the prompts it was given."""

    complete = staticmethod(COMPLETE)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.prompts_seen = [*getattr(self, "prompts_seen", []), *(list(ids) for ids in prompt_ids)]
        seen: dict[tuple, int] = {}
        completions = []
        for prompt in prompt_ids:
            number = seen[tuple(prompt)] = seen.get(tuple(prompt), -1) + 1
            completions.append(self.complete(prompt, number))
        return completions, None


class StoppingGRPOTrainer(ScriptedGRPOTrainer):
    complete = staticmethod(complete_or_stop)


class GradientRecorder(TrainerCallback):
    """The gradient of every optimizer step, by parameter name."""

    def __init__(self):
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        self.gradients.append(named)


class RunsAhead(TrainerCallback):
    """Has the trainer wait after its first optimizer step until `groups` are ready, so that how stale the next batches
    are does not depend on the machine.

    Args:
        groups: how many; no more than the run still trains on.
    """

    def __init__(self, trainer: A3POTrainer, groups: int):
        self.trainer = trainer
        self.groups = groups

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            until(lambda: self.trainer._session.queue.status().ready >= self.groups)


class TakeRecorder(A3POTrainer):
    """Keeps what each take hands out, with the version it happened at, and the outcomes at the end."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.takes: list[tuple[int, list[Group]]] = []

    def _take(self):
        rows = super()._take()
        self.takes.append((self.state.global_step, taken_groups(self)))
        return rows

    @property
    def groups(self) -> list[tuple[int, Group]]:
        """Each group with the version it was taken at."""
        return [(version, group) for version, groups in self.takes for group in groups]

    def close(self):
        session = self._session
        super().close()
        if session is not None:
            self.outcomes = session.queue.outcomes()


def build(
    model, folder, trainer_class: type[GRPOTrainer] = A3POTrainer, *, reward_funcs: Any = reward, **settings
) -> GRPOTrainer:
    """A trainer on the CPU, quick and quiet; `settings` are config fields and trainer arguments alike."""
    options = {name: settings.pop(name) for name in TRAINER_ARGUMENTS if name in settings}
    ours = issubclass(trainer_class, A3POTrainer)
    if ours:
        quick = {"engine": StubEngine(COMPLETE), "delivery_check_steps": 0}
        settings = {"max_staleness": 0, "log_all_metrics": True, **quick, **settings}
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": GENERATIONS,
        "max_completion_length": LENGTH,
        "max_steps": 4,
        "optim": "sgd",
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "bf16": False,
        "use_bias_correction_kl": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "model_init_kwargs": {"dtype": "float32"} if isinstance(model, str) else None,
        **settings,
    }
    args = (A3POConfig if ours else GRPOConfig)(
        output_dir=str(folder / trainer_class.__name__),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    torch.manual_seed(3)  # an adapter's initialisation
    return trainer_class(model, reward_funcs, args=args, **{"train_dataset": tiny_prompts(), **options})


def train_recorded(trainer: GRPOTrainer) -> list[dict[str, torch.Tensor]]:
    """Train, and return the gradients of every optimizer step."""
    recorder = GradientRecorder()
    trainer.add_callback(recorder)
    trainer.train()
    return recorder.gradients


def assert_same_gradients(mine, theirs, *, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    assert len(mine) == len(theirs) > 0
    for ours, expected in zip(mine, theirs, strict=True):
        assert ours.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(ours[name], gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_trains_as_grpo(model, folder, *, stops: bool = False, ours: dict[str, Any] | None = None, **settings):
    """Train both with `settings`, compare their gradients, and return `(A3POTrainer, GRPOTrainer)` after training.

    Args:
        model: a path, or a function that makes a model, called once for each.
        stops: some completions end with the stop token.
        ours: settings of `A3POTrainer` alone.
    """
    make = model if callable(model) else lambda: model
    theirs = build(make(), folder, StoppingGRPOTrainer if stops else ScriptedGRPOTrainer, **settings)
    expected = train_recorded(theirs)
    engine = StubEngine(complete_or_stop if stops else COMPLETE)
    mine = build(make(), folder, **settings, **{"engine": engine, **(ours or {})})
    assert_same_gradients(train_recorded(mine), expected)
    assert any(gradient.abs().max() > 1e-4 for step in expected for gradient in step.values())
    return mine, theirs


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def taken_groups(trainer: A3POTrainer) -> list[Group]:
    """The groups of the batch that a trainer in one process has just taken."""
    return [group for group, number in trainer._current_batch.rows if number == 0]
