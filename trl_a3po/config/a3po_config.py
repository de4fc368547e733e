"""`A3POConfig`: every setting of a run, and what follows from several of them.

Guarantees: a config that can be built can be run by `A3POTrainer`; a combination that would train something other
than what it says, or never fill a batch, is refused (`checks/`) with what to set instead. Everything of `GRPOConfig`
keeps its meaning; the few defaults that differ say why in their help.
"""

import math
from dataclasses import dataclass, field

import torch
from trl import GRPOConfig

from trl_a3po.config.check_engine import check_engine
from trl_a3po.config.check_objective import RIVALS, check_objective
from trl_a3po.config.check_schedule import check_schedule
from trl_a3po.config.check_values import check_checkpoints, check_choices, check_forward, check_numbers, check_types
from trl_a3po.config.plan import config_plan
from trl_a3po.rollout.take_plan import staleness_of_schedule

CHOICES = {
    "schedule": ("async", "sync", "periodic", "fixed_lag"),
    "objective": ("decoupled", "asympo", "spo", *RIVALS),
    "proximal_method": ("loglinear", "linear", "behavior", "reuse", "recompute"),
    "fresh_proximal": ("behavior", "policy"),
    "behavior_weight_mode": ("truncate", "mask", "none"),
    "behavior_weight_level": ("token", "sequence"),
    "kv_on_publish": ("keep", "recompute"),
    "lora_sync": ("adapter", "merged"),
    "packed_forward": ("auto", "on", "off"),
    "vllm_weight_transfer": ("auto", "disk", "nccl", "ipc"),
    "shared_prompt": ("auto", "on", "off"),
}


@dataclass
class A3POConfig(GRPOConfig):
    r"""
    Configuration of [`A3POTrainer`]: a [`~trl.GRPOConfig`] with the settings of asynchronous generation and of the
    decoupled loss.

    Parameters:
        > Parameters that control staleness

        max_staleness (`int`, *optional*, defaults to `4`):
            Largest number of optimizer steps between the policy that sampled a token and the policy when its batch is
            taken. 0 trains exactly as GRPO.
        schedule (`str`, *optional*, defaults to `"async"`):
            `"async"` generates ahead of training within `max_staleness`; `"sync"` generates each batch from the
            current policy and waits for it; `"periodic"` does too, but begins to train with the groups that are
            finished first, and takes one optimizer step when all are; `"fixed_lag"` samples every batch from the
            policy of exactly `max_staleness` steps before, so that a run does not depend on timing; it publishes at
            every batch and cannot replace a group.
        weight_sync_steps (`int`, *optional*, defaults to `1`):
            Optimizer steps between two publishes of the weights to the engine.
        max_attempts (`int`, *optional*, defaults to `3`):
            Times a prompt is generated again after its engine's worker died, before the run stops.

        > Parameters that control the objective

        objective (`str`, *optional*, defaults to `"decoupled"`):
            `"decoupled"` (A-3PO), `"asympo"`, `"spo"`, or a rival: `"masked_is"` (IcePop), `"aipo"` or `"m2po"`.
        proximal_method (`str`, *optional*, defaults to `"loglinear"`):
            Anchor of the trust region: `"loglinear"` (A-3PO, no forward pass), `"linear"`, `"behavior"`, `"reuse"`
            (the current policy; one optimizer step a batch) or `"recompute"` (a forward pass when the batch is taken).
        compare_proximal_every (`int`, *optional*, defaults to `0`):
            Optimizer steps between two comparisons of the log-linear anchor with the recomputed one, logged as
            `a3po/compare/…`; each costs a forward pass of one batch. 0 makes none.
        fresh_proximal (`str`, *optional*, defaults to `"behavior"`):
            Anchor of tokens of staleness 0: `"behavior"` keeps the trust region, `"policy"` removes it.
        behavior_weight_cap (`float`, *optional*, defaults to `5.0`):
            Largest behavior weight, above 1.
        behavior_weight_mode (`str`, *optional*, defaults to `"truncate"`):
            What happens to larger weights: `"truncate"` lowers them to the cap, `"mask"` drops the token, `"none"`
            keeps them.
        behavior_weight_level (`str`, *optional*, defaults to `"token"`):
            `"token"`, or `"sequence"` for one geometric-mean weight per completion. Follows
            `importance_sampling_level="sequence"`.
        asympo_min_scale (`float`, *optional*, defaults to `1e-3`):
            Floor of the scale that ASymPO divides by.
        spo_negative_scale (`float`, *optional*, defaults to `0.2`):
            Factor on negative advantages in SPO.
        masked_is_lower (`float`, *optional*, defaults to `0.5`):
            Smallest weight that masked IS keeps, below 1.
        masked_is_upper (`float`, *optional*, defaults to `5.0`):
            Largest weight that masked IS keeps, above 1.
        aipo_cap (`float`, *optional*, defaults to `4.0`):
            Largest weight of AIPO, above 1.
        m2po_threshold (`float`, *optional*, defaults to `0.04`):
            Largest mean of the squared log-ratio over the tokens of a micro-batch that M2PO keeps.

        > Parameters that control the engine

        engine (`str` or engine object, *optional*, defaults to `"transformers"`):
            What generates completions.
        engine_device (`str` or `list[str]`, *optional*):
            Device of the engine, or several, each of which decodes its share of `engine_slots`. By default the device
            of the trainer's main process.
        engine_dtype (`str`, *optional*):
            Dtype of the engine's forward. By default that of the trainer's forward.
        engine_slots (`int`, *optional*):
            Completions decoded at the same time. By default those of one generation batch, at most 64.
        engine_threads (`int`, *optional*):
            CPU threads of the engine's process. By default half of the cores; a trainer on the CPU then keeps to the
            other half while it trains.
        engine_restarts (`int`, *optional*, defaults to `3`):
            Times a dead engine process is started again before the run stops.
        kv_on_publish (`str`, *optional*, defaults to `"keep"`):
            What happens to sequences in flight when weights change: `"keep"` their cache or `"recompute"` it.
        deterministic (`bool`, *optional*, defaults to `False`):
            Tokens and log-probs of a completion independent, bit for bit, of what else is generated. Slower. With
            `engine="vllm"` it needs servers on GPUs with `VLLM_BATCH_INVARIANT=1`.
        engine_max_prompt_tokens (`int`, *optional*):
            Longest prompt the engine accepts. Needed by the transformers engine with `deterministic`, which pads every
            prompt to it.
        lora_sync (`str`, *optional*, defaults to `"adapter"`):
            Publish the adapter alone, or `"merged"` weights, merged out of place.
        delivery_check_steps (`int`, *optional*, defaults to `50`):
            Optimizer steps between two checks that the engine samples from the weights published last. The first one,
            at start, publishes a perturbed copy and needs memory for it; 0 switches all of them off.
        vllm_server_urls (`list[str]`, *optional*):
            Running vLLM servers to generate with. None has the trainer start one on `engine_device`.
        vllm_weight_transfer (`str`, *optional*, defaults to `"auto"`):
            How whole weights reach the servers: `"disk"`, `"nccl"` (from the trainer's GPU to others), `"ipc"` (CUDA
            IPC, on the trainer's GPU itself), or `"auto"`, which is the one of these two that the servers were started
            for where that is possible; a server started here takes CUDA IPC on the trainer's GPU, and NCCL on another
            where vLLM is installed beside the trainer. An adapter goes by disk.
        vllm_weights_dir (`str`, *optional*):
            Folder for weights on their way to the servers, which must be able to read it. By default
            `output_dir/vllm`.
        vllm_python (`str`, *optional*):
            Interpreter that runs the server the trainer starts, in an environment with vLLM. By default this one.
        vllm_outage_timeout (`float`, *optional*, defaults to `120.0`):
            Seconds without any server that can sample, after which the run stops.

        > Parameters that control rewards and waiting

        reward_workers (`int`, *optional*, defaults to `0`):
            0 runs reward functions in one background thread of the training process; n in n processes, a group each,
            which are killed when they hang, and each of which has its own copy of the functions' state.
        reward_timeout (`float`, *optional*):
            Seconds the reward functions may take for one group. With `reward_workers`, the group is then rejected;
            without, the run stops with a report.
        reward_on_timeout (`float`, *optional*):
            Reward of completions whose reward function was killed or died, instead of rejecting their group.
        drop_zero_variance_groups (`bool`, *optional*, defaults to `False`):
            Replace groups whose weighted rewards are all equal by groups of other prompts.
        max_rejected_groups_in_a_row (`int`, *optional*):
            Groups rejected in a row, for whatever reason, after which the run stops. By default those of 10 batches.
        stall_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds without any progress after which a wait ends with a report of who waits for whom.
        dry_run (`bool`, *optional*, defaults to `False`):
            Have `train` print the resolved plan and return.

        > Parameters that control the training forward

        packed_forward (`str`, *optional*, defaults to `"auto"`):
            `"auto"` runs a micro-batch as one row without padding where the model is known to give the same log-probs
            so, which the first batch checks, and padded elsewhere; `"on"` raises instead of padding; `"off"` pads.
        shared_prompt (`str`, *optional*, defaults to `"auto"`):
            Whether the completions of a prompt share its forward pass in a packed row: `"auto"` where it is cheaper,
            `"on"` always, `"off"` never.
    """

    bf16: bool | None = field(
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

    # Staleness
    max_staleness: int = field(
        default=4,
        metadata={
            "help": "Largest number of optimizer steps between the policy that sampled a token and the policy when "
            "its batch is taken. 0 trains exactly as GRPO."
        },
    )
    schedule: str = field(
        default="async",
        metadata={
            "help": "'async' generates ahead of training within max_staleness; 'sync' generates each batch from the "
            "current policy and waits for it; 'periodic' does too, but begins to train with the groups that are "
            "finished first (Periodic Asynchrony); 'fixed_lag' samples every batch from the policy of exactly "
            "max_staleness steps before, so that a run does not depend on timing.",
            "choices": list(CHOICES["schedule"]),
        },
    )
    weight_sync_steps: int = field(
        default=1, metadata={"help": "Optimizer steps between two publishes of the weights to the engine."}
    )
    max_attempts: int = field(
        default=3, metadata={"help": "Times a prompt is generated before a failing engine stops the run."}
    )

    # Objective
    objective: str = field(
        default="decoupled",
        metadata={
            "help": "'decoupled' (A-3PO), 'asympo', 'spo', or a rival: 'masked_is' (IcePop), 'aipo' or 'm2po'.",
            "choices": list(CHOICES["objective"]),
        },
    )
    proximal_method: str = field(
        default="loglinear",
        metadata={
            "help": "Anchor of the trust region: 'loglinear' (A-3PO, no forward pass), 'linear', 'behavior', 'reuse' "
            "(the current policy; one optimizer step a batch), 'recompute' (a forward pass when the batch is taken).",
            "choices": list(CHOICES["proximal_method"]),
        },
    )
    compare_proximal_every: int = field(
        default=0,
        metadata={
            "help": "Optimizer steps between two comparisons of the log-linear anchor with the recomputed one, logged "
            "as a3po/compare/…; each costs a forward pass of one batch. 0 makes none."
        },
    )
    fresh_proximal: str = field(
        default="behavior",
        metadata={
            "help": "Anchor of tokens of staleness 0: 'behavior' keeps the trust region, 'policy' removes it.",
            "choices": list(CHOICES["fresh_proximal"]),
        },
    )
    behavior_weight_cap: float = field(
        default=5.0, metadata={"help": "Largest behavior weight, above 1; see behavior_weight_mode."}
    )
    behavior_weight_mode: str = field(
        default="truncate",
        metadata={
            "help": "What happens to weights above the cap: 'truncate' lowers them to it, 'mask' drops the token, "
            "'none' keeps them.",
            "choices": list(CHOICES["behavior_weight_mode"]),
        },
    )
    behavior_weight_level: str = field(
        default="token",
        metadata={
            "help": "'token', or 'sequence' for one geometric-mean weight per completion; 'sequence' follows from "
            "importance_sampling_level='sequence'.",
            "choices": list(CHOICES["behavior_weight_level"]),
        },
    )
    asympo_min_scale: float = field(
        default=1e-3, metadata={"help": "Floor of the scale (mean token negative log-prob) that ASymPO divides by."}
    )
    spo_negative_scale: float = field(
        default=0.2, metadata={"help": "Factor on negative advantages in SPO, from 0 to 1."}
    )
    masked_is_lower: float = field(
        default=0.5, metadata={"help": "Smallest behavior weight that masked IS keeps, from 0 to below 1."}
    )
    masked_is_upper: float = field(
        default=5.0, metadata={"help": "Largest behavior weight that masked IS keeps, above 1."}
    )
    aipo_cap: float = field(default=4.0, metadata={"help": "Largest weight of AIPO, above 1."})
    m2po_threshold: float = field(
        default=0.04,
        metadata={"help": "Largest mean of log² of the behavior ratio over the tokens of a micro-batch M2PO keeps."},
    )

    # Engine
    engine: str = field(  # or an engine object; the annotation is for command lines
        default="transformers",
        metadata={"help": "What generates completions: 'transformers', or an object with the engine protocol."},
    )
    engine_device: list[str] | None = field(  # or one of them
        default=None,
        metadata={
            "help": "Devices of the engine, each of which decodes its share of engine_slots. Default: the device of "
            "the trainer's main process."
        },
    )
    engine_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype of the engine's forward: 'float32', 'bfloat16' or 'float16'. Default: the dtype of the "
            "trainer's forward, which keeps the gap between their log-probs small."
        },
    )
    engine_slots: int | None = field(
        default=None,
        metadata={"help": "Completions decoded at the same time. Default: one generation batch, at most 64."},
    )
    engine_threads: int | None = field(
        default=None,
        metadata={
            "help": "CPU threads of the engine's process. Default: half of the cores; a "
            "trainer on the CPU then keeps to the other half while it trains."
        },
    )
    engine_restarts: int = field(
        default=3, metadata={"help": "Times a dead engine process is started again before the run stops."}
    )
    kv_on_publish: str = field(
        default="keep",
        metadata={
            "help": "What happens to sequences in flight when weights change: 'keep' their cache (no stall; the "
            "recorded log-prob is the true one) or 'recompute' it under the new weights.",
            "choices": list(CHOICES["kv_on_publish"]),
        },
    )
    deterministic: bool = field(
        default=False,
        metadata={
            "help": "Make a completion's tokens and log-probs independent, bit for bit, of what else is generated at "
            "the same time, on one machine and thread count. Slower. With engine='vllm' it needs servers on GPUs that "
            "were started with VLLM_BATCH_INVARIANT=1."
        },
    )
    engine_max_prompt_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Longest prompt the engine accepts. Needed with deterministic=True and engine='transformers', "
            "which pads every prompt to it."
        },
    )
    lora_sync: str = field(
        default="adapter",
        metadata={
            "help": "Publish the adapter alone, or 'merged' weights, merged out of place.",
            "choices": list(CHOICES["lora_sync"]),
        },
    )
    delivery_check_steps: int = field(
        default=50,
        metadata={
            "help": "Optimizer steps between two checks that the engine samples from the weights published last. The "
            "first one, at start, publishes a perturbed copy and needs memory for it; 0 switches all of them off."
        },
    )
    vllm_server_urls: list[str] | None = field(
        default=None,
        metadata={
            "help": "URLs of running vLLM servers to generate with. None has the trainer start one on engine_device."
        },
    )
    vllm_weight_transfer: str = field(
        default="auto",
        metadata={
            "help": "How whole weights reach the vLLM servers: 'disk', 'nccl' (from the trainer's GPU to others), "
            "'ipc' (CUDA IPC, on the trainer's GPU itself), or 'auto', which is the one of these two that the servers "
            "were started for where that is possible; a server started here takes CUDA IPC on the trainer's GPU, and "
            "NCCL on another where vLLM is installed beside the trainer. An adapter goes by disk.",
            "choices": list(CHOICES["vllm_weight_transfer"]),
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
        metadata={"help": "Interpreter, of an environment with vLLM, for the server the trainer starts."},
    )
    vllm_outage_timeout: float = field(
        default=120.0,
        metadata={"help": "Seconds without any vLLM server that can sample, after which the run stops."},
    )

    # Rewards and waiting
    reward_workers: int = field(
        default=0,
        metadata={
            "help": "0 runs reward functions in one background thread of the training process, so closures keep "
            "their state; n in n processes, a group each, which are killed when they hang, and each of which has its "
            "own copy of that state."
        },
    )
    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds the reward functions may take for one group. With reward_workers, the group is then "
            "rejected (see reward_on_timeout); without, the run stops with a report."
        },
    )
    reward_on_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Reward of completions whose reward function was killed at reward_timeout or died, instead of "
            "rejecting their group."
        },
    )
    drop_zero_variance_groups: bool = field(
        default=False,
        metadata={"help": "Replace groups whose weighted rewards are all equal by groups of other prompts."},
    )
    max_rejected_groups_in_a_row: int | None = field(
        default=None,
        metadata={
            "help": "Groups rejected in a row, for whatever reason, after which the run stops. Default: 10 batches."
        },
    )
    stall_timeout: float = field(
        default=600.0,
        metadata={"help": "Seconds without any progress after which a wait ends with a report of who waits for whom."},
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Have train() print the resolved plan and return without training."}
    )

    # Training forward
    packed_forward: str = field(
        default="auto",
        metadata={
            "help": "'auto' runs a micro-batch as one row without padding where the model is known to give the same "
            "log-probs so, which the first batch checks, and padded elsewhere; 'on' raises instead of padding; 'off' "
            "pads.",
            "choices": list(CHOICES["packed_forward"]),
        },
    )
    shared_prompt: str = field(
        default="auto",
        metadata={
            "help": "Whether the completions of a prompt share its forward pass in a packed row: 'auto' where it is "
            "cheaper, 'on' always, 'off' never.",
            "choices": list(CHOICES["shared_prompt"]),
        },
    )

    def __post_init__(self):
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and torch.accelerator.is_available()
        super().__post_init__()
        check_types(self)
        self._map_trl_vllm_fields()
        check_choices(self, CHOICES)
        check_engine(self)
        check_numbers(self)
        check_checkpoints(self)
        check_forward(self)
        if self.importance_sampling_level == "sequence":
            self.behavior_weight_level = "sequence"
        check_objective(self)
        check_schedule(self)

    def __getstate__(self):
        """Checkpoints pickle the arguments; an engine object is not part of them, and is kept as its class's name."""
        state = dict(self.__dict__)
        if not isinstance(self.engine, str):
            state["engine"] = type(self.engine).__qualname__
        return state

    def plan(self) -> str:
        """What these settings resolve to, for a person; `A3POTrainer.plan` adds the memory."""
        return config_plan(self)

    @property
    def staleness_bound(self) -> int:
        """`max_staleness` as the schedule applies it."""
        return staleness_of_schedule(self.schedule, self.max_staleness)

    @property
    def recomputes_proximal(self) -> bool:
        """Whether a forward at take is needed: by `"recompute"`, under an objective that has a proximal policy."""
        return self.proximal_method == "recompute" and self.objective in ("decoupled", "masked_is")

    @property
    def engine_devices(self) -> list[str]:
        """`engine_device` as a list; empty where it follows the trainer."""
        given = self.engine_device
        return [given] if isinstance(given, str) else list(given or [])

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
        return self.steps_per_generation * self.num_iterations // self.takes_per_generation

    @property
    def optimizer_steps_per_generation(self) -> int:
        """K: the most optimizer steps that one generation batch is used for, at least 1."""
        micro_steps = self.steps_per_generation * self.num_iterations
        return max(1, math.ceil(micro_steps / self.gradient_accumulation_steps))

    def _map_trl_vllm_fields(self):
        if isinstance(self.vllm_server_urls, str):
            self.vllm_server_urls = [self.vllm_server_urls]
        if not self.use_vllm:
            return
        if self.vllm_mode == "colocate":
            raise ValueError(
                "use_vllm=True with vllm_mode='colocate' cannot generate while the same process trains: set "
                "use_vllm=False to generate with the 'transformers' engine on this device, or vllm_mode='server' to "
                "generate on a running vLLM server."
            )
        self.engine = "vllm"
        url = self.vllm_server_base_url or f"http://{self.vllm_server_host}:{self.vllm_server_port}"
        self.vllm_server_urls = self.vllm_server_urls or [url]
        self.use_vllm = False
