"""The settings that `A3POConfig` adds to `GRPOConfig`, in groups, each with its default, its range and its help.

Guarantees: a setting is described here and nowhere else: the command line, `help(A3POConfig)` and the documentation
show the help of its field. `Literal` annotations are the values that a setting can have, `Range` annotations the
numbers.
"""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trl_a3po.objectives.table import OBJECTIVES, ObjectiveSettings
from trl_a3po.protocol.ranges import Range

if TYPE_CHECKING:
    from trl_a3po.protocol.engine import Engine

    EngineChoice = str | Engine
    Names = str | list[str] | None
else:  # as command lines give them
    EngineChoice = str
    Names = list[str] | None

Count = Annotated[int, Range(least=1)]
CountOrZero = Annotated[int, Range(least=0)]
Seconds = Annotated[float, Range(above=0)]


@dataclass
class StalenessSettings:
    """How far generation runs ahead of training."""

    max_staleness: CountOrZero = field(
        default=4,
        metadata={
            "help": "Largest number of optimizer steps between the policy that sampled a token and the policy when "
            "the token's batch is taken. 0 trains exactly as GRPO."
        },
    )
    schedule: Literal["async", "sync", "periodic", "fixed_lag"] = field(
        default="async",
        metadata={
            "help": "When completions are generated. 'async' generates ahead of training, within max_staleness. "
            "'sync' generates each batch from the current policy and waits for the batch. 'periodic' does the same, "
            "but begins to train with the groups that are finished first, and takes one optimizer step when all are "
            "finished (Periodic Asynchrony). 'fixed_lag' samples every batch from the policy of exactly "
            "max_staleness steps before, so that a run does not depend on timing; it publishes at every batch and "
            "cannot replace a group."
        },
    )
    weight_sync_steps: Count = field(
        default=1, metadata={"help": "Optimizer steps between two publishes of the weights to the engine."}
    )
    max_attempts: Count = field(
        default=3, metadata={"help": "Attempts at a prompt whose generation fails, before the run stops."}
    )


@dataclass
class ObjectiveChoice:
    """Which objective; each has settings of its own (`objectives/table.py`)."""

    objective: str = field(
        default="decoupled",
        metadata={
            "help": "What is minimised. "
            + "; ".join(f"'{objective.name}': {objective.summary}" for objective in OBJECTIVES.values())
            + ".",
            "choices": list(OBJECTIVES),
        },
    )


@dataclass
class EngineSettings:
    """What generates completions, where, and from which weights."""

    engine: EngineChoice = field(
        default="transformers",
        metadata={
            "help": "What generates completions: 'transformers', 'vllm', or an object with the methods of "
            "trl_a3po.protocol.engine.Engine."
        },
    )
    engine_device: Names = field(
        default=None,
        metadata={
            "help": "Device of the engine, or several devices, each of which decodes its share of engine_slots; with "
            "engine='vllm' and vllm_tensor_parallel_size=n, n devices that follow each other hold one replica. "
            "Default: the device of the trainer's main process."
        },
    )
    engine_dtype: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None,
        metadata={
            "help": "Dtype of the engine's forward pass: 'float32', 'bfloat16' or 'float16'. Default: the dtype of "
            "the trainer's forward pass, which keeps the gap between their log-probs small."
        },
    )
    engine_slots: Count | None = field(
        default=None,
        metadata={
            "help": "Completions decoded at the same time. Default: those of one generation batch, at most 64; "
            "with vLLM 256 in each replica."
        },
    )
    engine_threads: Count | None = field(
        default=None,
        metadata={
            "help": "CPU threads of the engine's process. Default: half of the cores; a trainer on the CPU then uses "
            "the other half while it trains."
        },
    )
    engine_restarts: CountOrZero = field(
        default=3,
        metadata={
            "help": "Times that a dead engine process is started again before the run stops. A process that cannot "
            "start, or that an error ends before any group is finished, is not started again."
        },
    )
    kv_on_publish: Literal["keep", "recompute"] = field(
        default="keep",
        metadata={
            "help": "What happens to the key-value cache of sequences in flight when weights change. 'keep' costs no "
            "time, and the recorded log-prob is that of the distribution the token was sampled from; 'recompute' "
            "fills the cache again under the new weights."
        },
    )
    deterministic: bool = field(
        default=False,
        metadata={
            "help": "Make the tokens and log-probs of a completion independent, bit for bit, of what else is "
            "generated at the same time, on one machine and thread count. Slower. With engine='vllm' it needs "
            "GPUs, and servers that were started with VLLM_BATCH_INVARIANT=1."
        },
    )
    engine_max_prompt_tokens: Count | None = field(
        default=None,
        metadata={
            "help": "Longest prompt that the engine accepts, in tokens. Needed with deterministic=True and "
            "engine='transformers', which pads every prompt to this length."
        },
    )
    lora_sync: Literal["adapter", "merged"] = field(
        default="adapter",
        metadata={
            "help": "What is published of a LoRA policy: 'adapter' sends the adapter alone; 'merged' sends the "
            "weights with the adapter merged into a copy."
        },
    )
    delivery_check_steps: CountOrZero = field(
        default=50,
        metadata={
            "help": "Optimizer steps between two checks that the engine samples from the weights published last. The "
            "first check, at the start, publishes a perturbed copy of the weights and needs memory for it. 0 "
            "switches all checks off."
        },
    )
    max_engine_gap: Annotated[float, Range(above=0)] | None = field(
        default=None,
        metadata={
            "help": "Largest mean |Δ log-prob| between the engine and the trainer, under the same weights, that is "
            "normal. Beyond it the run warns, and after 5 such measurements in a row it stops. Default: 10 times the "
            "gap of the first fresh batch, but from 0.005 to 0.02 in float32, from 0.02 to 0.1 in float16 and from "
            "0.1 to 0.3 in bfloat16."
        },
    )


@dataclass
class VLLMSettings:
    """vLLM, in a process of the trainer or on servers."""

    vllm_server_urls: Names = field(
        default=None,
        metadata={
            "help": "URLs of running vLLM servers to generate with. Default: vLLM runs in a process of the "
            "trainer on each of engine_device."
        },
    )
    vllm_weight_transfer: Literal["auto", "disk", "nccl"] = field(
        default="auto",
        metadata={
            "help": "How whole weights reach the vLLM servers of vllm_server_urls: 'disk', 'nccl' (from the trainer's "
            "GPU to other GPUs), or 'auto', which takes NCCL "
            "if the servers were started for it and it is possible, and the disk otherwise. An adapter always goes "
            "by disk."
        },
    )
    vllm_weights_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder for weights on their way to the vLLM servers, which must be able to read it. Default: "
            "output_dir/vllm."
        },
    )
    vllm_python: str | None = field(
        default=None,
        metadata={
            "help": "Python interpreter, of an environment with vLLM, for vLLM in a process of the trainer. "
            "Default: the trainer's own interpreter."
        },
    )
    vllm_outage_timeout: Seconds = field(
        default=120.0,
        metadata={"help": "Seconds without any vLLM server that can sample, after which the run stops."},
    )


@dataclass
class EpisodeSettings:
    """Tools, environments and rollout functions."""

    tool_timeout: Seconds | None = field(
        default=None,
        metadata={
            "help": "Seconds that one call of a tool or of an environment may take. The policy is then told that the "
            "tool gave no answer; a reset() or get_reward() that takes longer makes the attempt at its group fail. "
            "Default: no limit."
        },
    )
    episode_timeout: Seconds | None = field(
        default=None,
        metadata={
            "help": "Seconds that one episode, with all of its turns, may take. The attempt at its group then fails, "
            "and is made again at most max_attempts times. Default: no limit."
        },
    )
    tool_threads: Count = field(
        default=64, metadata={"help": "Calls of synchronous tools and environments that run at the same time."}
    )
    environment_processes: bool = field(
        default=False,
        metadata={
            "help": "Run each environment in a process of its own, for environments that block Python, crash, or keep "
            "state in their modules. A process that dies makes the attempt at its group fail, and is replaced. There "
            "are as many processes as episodes played at the same time."
        },
    )


@dataclass
class RewardSettings:
    """Reward functions, and the ends of waits."""

    reward_workers: CountOrZero = field(
        default=0,
        metadata={
            "help": "Processes that run reward functions. 0 runs them in one background thread of the training "
            "process, so closures keep their state. n runs them in n processes, one group at a time each; a process "
            "that hangs is killed and replaced, and each process has its own copy of the functions' state."
        },
    )
    reward_timeout: Seconds | None = field(
        default=None,
        metadata={
            "help": "Seconds that the reward functions may take for one group. With reward_workers, the group is "
            "then rejected (see reward_on_timeout); without, the run stops with a report. A function that holds "
            "Python's interpreter lock for 5 seconds longer ends the process. Default: stall_timeout, at which the "
            "run stops."
        },
    )
    reward_on_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Reward of the completions whose reward function was killed at reward_timeout, or died. Default: "
            "their group is rejected."
        },
    )
    drop_zero_variance_groups: bool = field(
        default=False,
        metadata={"help": "Replace groups whose weighted rewards are all equal by groups of other prompts."},
    )
    max_rejected_groups_in_a_row: Count | None = field(
        default=None,
        metadata={
            "help": "Groups rejected in a row, for whatever reason, after which the run stops. Default: the groups "
            "of 10 batches."
        },
    )
    stall_timeout: Seconds = field(
        default=600.0,
        metadata={
            "help": "Seconds without any progress, after which a wait ends with a report of what waits for what. A "
            "process that cannot even report, because something holds Python's interpreter lock, is ended 5 seconds "
            "later."
        },
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Have train() print the resolved plan and return without training."}
    )


@dataclass
class ForwardSettings:
    """The trainer's forward pass."""

    packed_forward: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "Whether a micro-batch runs as one row without padding. 'auto' packs where the model is known to "
            "give the same log-probs packed, which the first batch checks, and pads elsewhere; 'on' raises an error "
            "instead of padding; 'off' always pads."
        },
    )
    shared_prompt: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "Whether the completions of a prompt share the forward pass of the prompt in a packed row: "
            "'auto' where this is cheaper, 'on' always, 'off' never."
        },
    )


@dataclass
class LogSettings:
    """What a person sees."""

    log_all_metrics: bool = field(
        default=False,
        metadata={
            "help": "Show every metric on the console and keep it in trainer.state.log_history. By default, these "
            "have TRL's metrics and a few of a3po/..., and all others are in timeline.jsonl and in the trackers of "
            "report_to, which get every metric in any case."
        },
    )
    kept_rollouts: CountOrZero = field(
        default=1000,
        metadata={
            "help": "How many of the run's rollouts are written to rollouts.jsonl in output_dir, with the text, the "
            "version and the log-probs of each token, for `trl-a3po report`. They are whole groups, spread evenly "
            "over the run. 0 keeps none."
        },
    )


GROUPS: dict[str, tuple[type, ...]] = {
    "Staleness": (StalenessSettings,),
    "Objective": (ObjectiveChoice, *ObjectiveSettings.__bases__),
    "Engine": (EngineSettings,),
    "vLLM": (VLLMSettings,),
    "Tools and environments": (EpisodeSettings,),
    "Rewards and waiting": (RewardSettings,),
    "Training forward": (ForwardSettings,),
    "Logging": (LogSettings,),
}
"""Heading -> the classes whose fields are the settings below it."""


def settings_by_group() -> Iterator[tuple[str, type, Field[Any]]]:
    """`(heading, class, field)` of every setting that `A3POConfig` adds to `GRPOConfig`, each once."""
    seen: set[str] = set()
    for heading, classes in GROUPS.items():
        for cls in classes:
            for setting in fields(cls):
                if setting.name not in seen:
                    seen.add(setting.name)
                    yield heading, cls, setting
