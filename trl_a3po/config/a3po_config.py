"""`A3POConfig`: every setting of a run, and what follows from several of them.

Guarantees: a config that can be built can be run by `A3POTrainer`; a combination that would train something other
than what it says, or never fill a batch, raises a `ValueError` that says what to set instead. Everything of
`GRPOConfig` keeps its meaning; the few defaults that differ say why in their help.
"""

import copy
import inspect
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from trl import GRPOConfig

from trl_a3po.config.check_engine import check_engine
from trl_a3po.config.check_inherited import check_inherited, trl_server_url
from trl_a3po.config.check_kinds import FILES, check_kinds
from trl_a3po.config.check_objective import check_objective
from trl_a3po.config.check_schedule import check_schedule
from trl_a3po.config.check_values import check_checkpoints, check_choices, check_forward, check_numbers, check_types
from trl_a3po.config.compile_locks import is_launched_with_deepspeed, warn_of_stale_locks
from trl_a3po.config.documentation import parameters_section
from trl_a3po.config.plan import config_plan
from trl_a3po.config.settings import (
    EngineSettings,
    EpisodeSettings,
    ForwardSettings,
    LogSettings,
    ObjectiveChoice,
    RewardSettings,
    StalenessSettings,
    VLLMSettings,
)
from trl_a3po.objectives.objective import Objective
from trl_a3po.objectives.table import OBJECTIVES, ObjectiveSettings
from trl_a3po.rollout.take_plan import staleness_of_schedule


class _BuiltGRPOConfig(GRPOConfig):
    """For type checkers: what `GRPOConfig` annotates as optional, and has once it is built."""

    if TYPE_CHECKING:
        output_dir: str
        max_completion_length: int
        num_generations: int
        generation_batch_size: int
        steps_per_generation: int


@dataclass
class A3POConfig(
    StalenessSettings,
    ObjectiveChoice,
    ObjectiveSettings,
    EngineSettings,
    VLLMSettings,
    EpisodeSettings,
    RewardSettings,
    ForwardSettings,
    LogSettings,
    _BuiltGRPOConfig,
):
    """
    Configuration of [`A3POTrainer`]: a [`~trl.GRPOConfig`] with the settings of asynchronous generation and of the
    decoupled loss.

    Two defaults differ from those of `GRPOConfig`: `bf16` is off where there is no accelerator, because training in
    bfloat16 is 15 to 35 times slower than in float32 on a CPU; `use_bias_correction_kl` is off, because under
    asynchrony it would multiply the KL term by a ratio that is not taken from the behavior policy.

    Raises:
        ValueError: a setting that is out of its range, or a combination of settings that cannot be trained; the
            message says what to set instead.
    """

    bf16: bool | None = field(  # type: ignore[assignment]  # transformers annotates it as bool, TRL as here
        default=None,
        metadata={
            "help": "Train in bfloat16. Default: on where there is an accelerator; off on a CPU, where it is 15 to 35 "
            "times slower than float32."
        },
    )
    use_bias_correction_kl: bool = field(
        default=False,
        metadata={
            "help": "Multiply the KL term by the importance ratio. Off, unlike in GRPOConfig: under asynchrony the "
            "ratio is taken from the proximal policy and would not correct for the behavior policy."
        },
    )

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and torch.accelerator.is_available()
        self._read_unquoted_no()
        self._find_files()
        check_kinds(self, GRPOConfig)
        if self.deepspeed is not None or is_launched_with_deepspeed():
            warn_of_stale_locks()  # before DeepSpeed compiles, or waits, when it sets up its communication
        super().__post_init__()
        for name in ("packed_forward", "shared_prompt"):
            if isinstance(value := getattr(self, name), bool):  # YAML reads an unquoted on or off so
                setattr(self, name, "on" if value else "off")
        check_types(self)
        self.output_dir = _whole_path(self.output_dir)
        if self.vllm_weights_dir is not None:
            self.vllm_weights_dir = _whole_path(self.vllm_weights_dir)
        if self.vllm_python is not None and os.path.dirname(self.vllm_python):  # else it is looked up in PATH
            self.vllm_python = _whole_path(self.vllm_python)
        self._map_trl_vllm_fields()
        self.check()

    def check(self) -> None:
        """Raise `ValueError` for settings that cannot be run with, such as values that were set after the
        configuration was made."""
        check_choices(self)
        check_inherited(self)
        check_engine(self)
        check_numbers(self)
        check_checkpoints(self)
        check_forward(self)
        check_objective(self)
        check_schedule(self)

    def __copy__(self) -> Self:
        return self._with(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of everything but an engine object, which the copy shares."""
        return self._with({name: copy.deepcopy(value, memo) for name, value in self._plain().items()})

    def __getstate__(self) -> dict[str, Any]:
        """Checkpoints pickle the arguments: without a token of the hub, and with the name of its class for an engine
        object."""
        return {name: None if name.endswith("_token") else value for name, value in self._plain().items()}

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values; an engine object as the name of its class."""
        # TrainingArguments writes into the dictionaries that it converts, such as model_init_kwargs.
        copied = self._with({name: _copied(value) for name, value in self.__dict__.items()})
        return {**super(A3POConfig, copied).to_dict(), "engine": self._plain()["engine"]}

    def _plain(self) -> dict[str, Any]:
        engine = self.engine if isinstance(self.engine, str) else type(self.engine).__qualname__
        return {**self.__dict__, "engine": engine}

    def _with(self, state: dict[str, Any]) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__.update(state, engine=self.engine)
        return new

    def plan(self) -> str:
        """What these settings resolve to, for a person; `A3POTrainer.plan` adds the memory."""
        return config_plan(self)

    @property
    def staleness_bound(self) -> int:
        """`max_staleness` as the schedule applies it."""
        return staleness_of_schedule(self.schedule, self.max_staleness)

    @property
    def objective_record(self) -> Objective:
        """The record of `objective`."""
        return OBJECTIVES[self.objective]

    @property
    def recomputes_proximal(self) -> bool:
        """Whether a forward pass at the take is needed: by `"recompute"`, if the objective has a proximal policy."""
        return self.proximal_method == "recompute" and self.objective_record.has_proximal_policy

    @property
    def engine_devices(self) -> list[str]:
        """`engine_device` as a list; empty where it follows the trainer."""
        given = self.engine_device
        return [given] if isinstance(given, str) else list(given or [])

    @property
    def engine_replicas(self) -> list[list[str]]:
        """`engine_devices`, those of each replica together; empty where they follow the trainer."""
        devices, size = self.engine_devices, self.vllm_tensor_parallel_size
        return [devices[first : first + size] for first in range(0, len(devices), size)]

    @property
    def lag(self) -> int | None:
        """`schedule="fixed_lag"`: how many generation batches before its own a batch is sampled."""
        return self.max_staleness // self.optimizer_steps_per_generation if self.schedule == "fixed_lag" else None

    @property
    def groups_per_batch(self) -> int:
        """The prompts of one generation batch."""
        return self.generation_batch_size // self.num_generations

    @property
    def groups_per_take(self) -> int:
        """B: the groups that one take hands out, all of the generation batch or, with `schedule="periodic"`, those of
        one micro-step."""
        return self.groups_per_batch // self.takes_per_generation

    @property
    def takes_per_generation(self) -> int:
        """Takes that hand out a generation batch: one, or, with `schedule="periodic"`, one in each micro-step."""
        return self.steps_per_generation if self.schedule == "periodic" else 1

    @property
    def micro_steps_per_take(self) -> int:
        """Micro-steps from one take to the next."""
        return self.micro_steps_per_generation // self.takes_per_generation

    @property
    def optimizer_steps_per_generation(self) -> int:
        """K: the most optimizer steps that one generation batch is used for, at least 1."""
        return max(1, math.ceil(self.micro_steps_per_generation / self.gradient_accumulation_steps))

    @property
    def micro_steps_per_generation(self) -> int:
        """The micro-steps that one generation batch is used for, on each process."""
        return self.steps_per_generation * self.num_iterations

    @property
    def completions_per_micro_step(self) -> int:
        """The completions that all processes together train in one micro-step."""
        return self.generation_batch_size // self.steps_per_generation

    def _read_unquoted_no(self) -> None:
        """YAML reads it as False."""
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            if getattr(self, name) is False:
                setattr(self, name, "no")

    def _find_files(self) -> None:
        """Paths that `TrainingArguments` reads at once, with the home folder for `~`."""
        for name in FILES:
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, os.path.expanduser(value))

    def _map_trl_vllm_fields(self) -> None:
        if isinstance(self.vllm_server_urls, str):
            self.vllm_server_urls = [self.vllm_server_urls]
        if not self.use_vllm:
            return
        self.engine = "vllm"
        if self.vllm_mode == "server":
            self.vllm_server_urls = self.vllm_server_urls or [trl_server_url(self)]
        elif self.engine_device is None and self.device.type == "cuda":  # on every GPU of this machine that trains
            self.engine_device = [f"cuda:{index}" for index in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))]
        self.use_vllm = False


# The settings are described once, by the help of their fields.
A3POConfig.__doc__ = f"{inspect.cleandoc(A3POConfig.__doc__ or '')}\n\n{parameters_section()}"


def _whole_path(path: str) -> str:
    """`path` from the root, with the home folder for `~`: no shell reads a recipe or an unusual argument, and a reward
    function may change the working folder of the process while a checkpoint is written."""
    return os.path.abspath(os.path.expanduser(path))


def _copied(value: Any) -> Any:
    """`value`, with dictionaries of its own."""
    return {key: _copied(part) for key, part in value.items()} if isinstance(value, dict) else value
