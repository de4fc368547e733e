"""`A3POConfig`: every setting of a run, checked before anything is built.

Guarantees: a config that can be built can be run by `A3POTrainer`; a combination that would train something other
than what it says, or never fill a batch, is refused with what to set instead. Everything of `GRPOConfig` keeps its
meaning; the few defaults that differ say why in their help.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

import torch
from trl import GRPOConfig

from trl_a3po.rollout.admission import staleness_of_schedule, starves

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
RIVALS = ("masked_is", "aipo", "m2po")
RIVAL_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
STEP_NORMALIZED_LOSS_TYPES = ("dapo", "cispo", "vespo")  # divided by the tokens of the whole optimizer step

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
    "vllm_weight_transfer": ("auto", "disk", "nccl"),
    "shared_prompt": ("auto", "on", "off"),
}

ENGINE_METHODS = ("start", "submit", "wait", "cancel", "publish", "score", "stats", "close")


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
            CPU threads of the engine's process. By default half of the cores.
        engine_restarts (`int`, *optional*, defaults to `3`):
            Times a dead engine process is started again before the run stops.
        kv_on_publish (`str`, *optional*, defaults to `"keep"`):
            What happens to sequences in flight when weights change: `"keep"` their cache or `"recompute"` it.
        deterministic (`bool`, *optional*, defaults to `False`):
            Tokens and log-probs of a completion independent, bit for bit, of what else is generated. Slower.
        engine_max_prompt_tokens (`int`, *optional*):
            Longest prompt the engine accepts. Needed with `deterministic`, which pads every prompt to it.
        lora_sync (`str`, *optional*, defaults to `"adapter"`):
            Publish the adapter alone, or `"merged"` weights, merged out of place.
        delivery_check_steps (`int`, *optional*, defaults to `50`):
            Optimizer steps between two checks that the engine samples from the weights published last. The first one,
            at start, publishes a perturbed copy and needs memory for it; 0 switches all of them off.
        vllm_server_urls (`list[str]`, *optional*):
            Running vLLM servers to generate with. None has the trainer start one on `engine_device`.
        vllm_weight_transfer (`str`, *optional*, defaults to `"auto"`):
            How whole weights reach the servers: `"disk"`, `"nccl"`, or `"auto"`, which is NCCL where the servers were
            started for it and the trainer is on a GPU. An adapter goes by disk.
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
        default=None, metadata={"help": "CPU threads of the engine's process. Default: half of the cores."}
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
            "the same time, on one machine and thread count. Slower."
        },
    )
    engine_max_prompt_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Longest prompt the engine accepts. Needed with deterministic=True, which pads every prompt to it."
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
            "help": "How whole weights reach the vLLM servers: 'disk', 'nccl', or 'auto', which is NCCL where the "
            "servers were started for it and the trainer is on a GPU. An adapter goes by disk.",
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
        self._map_trl_vllm_fields()
        self._check_names()
        self._check_engine_device()
        self._check_vllm()
        self._check_numbers()
        self._check_forward()
        self._check_objective()
        self._check_staleness()

    def __getstate__(self):
        """Checkpoints pickle the arguments; an engine object is not part of them, and is kept as its class's name."""
        state = dict(self.__dict__)
        if not isinstance(self.engine, str):
            state["engine"] = type(self.engine).__qualname__
        return state

    def plan(self) -> str:
        """What these settings resolve to, for a person; `A3POTrainer.plan` adds the memory."""
        from trl_a3po.report.plan import config_plan  # which needs this module

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
    def lag(self) -> int | None:
        """`schedule="fixed_lag"`: how many generation batches before its own a batch is sampled."""
        return self.max_staleness // self.optimizer_steps_per_generation if self.schedule == "fixed_lag" else None

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

    def _check_names(self):
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not known: set one of {', '.join(map(repr, choices))}.")
        if isinstance(self.engine, str) and self.engine not in ("transformers", "vllm"):
            raise ValueError(
                f"engine={self.engine!r} is not known: set 'transformers', 'vllm', or an object with the methods of "
                "trl_a3po.engines.protocol.Engine."
            )
        if not isinstance(self.engine, str):
            self._check_engine_object()
        if self.engine_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"engine_dtype={self.engine_dtype!r} is not known: set 'float32', 'bfloat16' or 'float16', or leave "
                "it out to follow the trainer."
            )
        if self.use_transformers_continuous_batching:
            raise ValueError(
                "use_transformers_continuous_batching=True has no effect here: the 'transformers' engine batches "
                "continuously by itself. Leave it False."
            )

    def _check_forward(self):
        if self.shared_prompt != "on":
            return
        if self.packed_forward == "off":
            raise ValueError(
                "shared_prompt='on' with packed_forward='off' cannot hold, because a prompt is shared in a packed "
                "row: set packed_forward='auto', or shared_prompt='off'."
            )
        if self.per_device_train_batch_size == 1:
            raise ValueError(
                "shared_prompt='on' with per_device_train_batch_size=1 has nothing to share: set it to "
                f"num_generations={self.num_generations}, or to a part or a multiple of it, or set "
                "shared_prompt='auto'."
            )

    def _check_vllm(self):
        if self.engine != "vllm":
            if self.vllm_server_urls:
                raise ValueError(
                    f"vllm_server_urls={self.vllm_server_urls} is not used with engine={self.engine!r}: set "
                    "engine='vllm', or leave it out."
                )
            return
        if self.deterministic:
            raise ValueError(
                "deterministic=True cannot hold with engine='vllm', whose results depend on what it batches: set "
                "engine='transformers' or deterministic=False."
            )
        for name, unset, instead in (
            ("vllm_structured_outputs_regex", None, "completions are not constrained"),
            ("vllm_enable_sleep_mode", False, "the server samples while the trainer trains"),
            ("vllm_model_impl", "vllm", "start the server with --model-impl and set vllm_server_urls"),
            ("vllm_tensor_parallel_size", 1, "start the server with --tensor-parallel-size and set vllm_server_urls"),
        ):
            if getattr(self, name) != unset:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not used with engine='vllm': leave it at {unset!r}; {instead}."
                )
        if not self.vllm_server_urls and len(self.engine_devices) > 1:
            raise ValueError(
                f"engine_device={self.engine_device!r} with engine='vllm' starts one server, on one device: name one, "
                "or start a server on each and set vllm_server_urls."
            )
        if self.vllm_server_urls and self.engine_slots is not None:
            raise ValueError(
                f"engine_slots={self.engine_slots} is decided by running vLLM servers: start them with --max-num-seqs "
                f"{self.engine_slots}, and leave engine_slots out."
            )
        for url in self.vllm_server_urls or ():
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"vllm_server_urls holds {url!r}: set URLs such as 'http://localhost:8000'.")

    def _check_engine_object(self):
        if isinstance(self.engine, type):
            raise ValueError(f"engine={self.engine.__name__} is a class: pass an object of it.")
        missing = [name for name in ENGINE_METHODS if not callable(getattr(self.engine, name, None))]
        if missing:
            raise ValueError(
                f"engine is a {type(self.engine).__name__} without {', '.join(missing)}: set 'transformers', 'vllm', "
                "or an object with the methods of trl_a3po.engines.protocol.Engine."
            )

    @property
    def engine_devices(self) -> list[str]:
        """`engine_device` as a list; empty where it follows the trainer."""
        given = self.engine_device
        return [given] if isinstance(given, str) else list(given or [])

    def _check_engine_device(self):
        here = f"'cpu'{' or an accelerator of this machine' if torch.accelerator.is_available() else ''}"
        accelerator = torch.accelerator.current_accelerator()
        known = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
        for name in self.engine_devices:
            try:
                device = torch.device(name)
            except (RuntimeError, TypeError):
                raise ValueError(f"engine_device={name!r} is not a device: set {here}.") from None
            last = 0 if device.type == "cpu" else torch.accelerator.device_count() - 1
            if device.type not in known or (device.index or 0) > last:
                raise ValueError(f"engine_device={name!r} does not exist here: set {here}.")

    def _check_numbers(self):
        at_least = {
            "max_staleness": 0,
            "compare_proximal_every": 0,
            "weight_sync_steps": 1,
            "max_attempts": 1,
            "engine_slots": 1,
            "engine_threads": 1,
            "engine_restarts": 0,
            "engine_max_prompt_tokens": 1,
            "delivery_check_steps": 0,
            "reward_workers": 0,
            "max_rejected_groups_in_a_row": 1,
        }
        optional = {setting.name for setting in fields(self) if setting.default is None}
        for name, low in at_least.items():
            value = getattr(self, name)
            if not ((type(value) is int and value >= low) or (value is None and name in optional)):
                raise ValueError(f"{name}={value!r} must be a whole number of at least {low}.")
        for name in ("reward_timeout", "vllm_outage_timeout", "stall_timeout", "asympo_min_scale", "temperature"):
            value = getattr(self, name)
            if not ((_is_number(value) and 0 < value < math.inf) or (value is None and name in optional)):
                raise ValueError(f"{name}={value!r} must be a finite number above 0.")
        if not (_is_number(self.spo_negative_scale) and 0 <= self.spo_negative_scale <= 1):
            raise ValueError(f"spo_negative_scale={self.spo_negative_scale!r} must be a number from 0 to 1.")
        self._check_rival_numbers()
        if not _is_number(self.behavior_weight_cap):
            raise ValueError(
                f"behavior_weight_cap={self.behavior_weight_cap!r} must be a number above 1; set "
                "behavior_weight_mode='none' for no cap."
            )
        if self.behavior_weight_mode != "none" and not self.behavior_weight_cap > 1:
            raise ValueError(
                f"behavior_weight_cap={self.behavior_weight_cap!r} would change tokens whose policies agree (w = 1): "
                "set a cap above 1, or behavior_weight_mode='none' for no cap."
            )
        if self.deterministic and self.engine_max_prompt_tokens is None:
            raise ValueError(
                "deterministic=True pads every prompt to one length, which engine_max_prompt_tokens=None leaves open: "
                "set engine_max_prompt_tokens to the length of your longest prompt."
            )
        if self.reward_on_timeout is not None:
            self._check_reward_on_timeout()
        if self.drop_zero_variance_groups and self.schedule == "fixed_lag":
            raise ValueError(
                "drop_zero_variance_groups=True with schedule='fixed_lag' cannot replace a group: its batch is "
                "sampled as one: set drop_zero_variance_groups=False or schedule='async'."
            )

    def _check_rival_numbers(self):
        for name, range_, holds in (
            ("masked_is_lower", "at least 0 and below 1", lambda value: 0 <= value < 1),
            ("masked_is_upper", "above 1", lambda value: 1 < value < math.inf),
            ("aipo_cap", "above 1", lambda value: 1 < value < math.inf),
            ("m2po_threshold", "above 0", lambda value: 0 < value < math.inf),
        ):
            value = getattr(self, name)
            if not (_is_number(value) and holds(value)):
                raise ValueError(f"{name}={value!r} must be a finite number {range_}.")

    def _check_reward_on_timeout(self):
        value = self.reward_on_timeout
        if not (_is_number(value) and math.isfinite(value)):
            raise ValueError(f"reward_on_timeout={value!r} must be a finite number; None rejects the group.")
        if self.reward_timeout is None:
            raise ValueError(
                f"reward_on_timeout={value!r} without a reward_timeout would never be used for a function that hangs: "
                "set reward_timeout, or leave reward_on_timeout out."
            )
        if not self.reward_workers:
            raise ValueError(
                f"reward_on_timeout={value!r} with reward_workers=0 cannot be used, because a thread that hangs "
                "cannot be killed: set reward_workers to 1 or more, or leave reward_on_timeout out."
            )

    def _check_objective(self):
        if self.importance_sampling_level == "sequence":
            self.behavior_weight_level = "sequence"
        elif self.behavior_weight_level == "sequence" and self.objective == "decoupled":
            raise ValueError(
                "behavior_weight_level='sequence' with importance_sampling_level='token' breaks w·r = ρ: set both to "
                "'sequence' or both to 'token'."
            )
        self._check_kl()
        self._check_comparison()
        if self.objective == "decoupled":
            self._check_decoupled()
        elif self.objective in RIVALS:
            self._check_rival()
        else:
            self._check_balanced()

    def _check_kl(self):
        """TRL corrects the KL term by `r`; that is the behavior ratio `ρ` only where the anchor is `lb`."""
        if self.beta == 0 or not self.use_bias_correction_kl:
            return
        interpolates = self.proximal_method in ("loglinear", "linear") and self.fresh_proximal == "behavior"
        at_behavior = self.proximal_method == "behavior" or (interpolates and self.staleness_bound <= 1)
        if self.objective != "decoupled" or not at_behavior:
            raise ValueError(
                f"use_bias_correction_kl=True with objective={self.objective!r}, proximal_method="
                f"{self.proximal_method!r} and tokens up to {self.staleness_bound} steps stale multiplies the KL term "
                "by a ratio that is not taken from the behavior policy: set use_bias_correction_kl=False, or "
                "objective='decoupled' with max_staleness=1 or proximal_method='behavior'."
            )

    def _check_comparison(self):
        if not self.compare_proximal_every:
            return
        for name, needed in (("objective", "decoupled"), ("proximal_method", "loglinear")):
            if getattr(self, name) != needed:
                raise ValueError(
                    f"compare_proximal_every={self.compare_proximal_every} compares the log-linear anchor, which "
                    f"{name}={getattr(self, name)!r} does not use: set compare_proximal_every=0, or {name}={needed!r}."
                )
        if self.schedule == "periodic":
            raise ValueError(
                f"compare_proximal_every={self.compare_proximal_every} has nothing to compare with "
                "schedule='periodic', where no token is stale: set compare_proximal_every=0."
            )

    def _check_decoupled(self):
        steps = self.optimizer_steps_per_generation
        if self.loss_type not in CLIPPED_LOSS_TYPES:
            raise ValueError(
                f"loss_type={self.loss_type!r} is not defined for objective='decoupled', whose ratio r is only a part "
                f"of the policy ratio: set one of {', '.join(map(repr, CLIPPED_LOSS_TYPES))}."
            )
        if self.delta is not None:
            raise ValueError(
                f"delta={self.delta!r} would cap r, not the policy ratio: leave it out and set behavior_weight_cap."
            )
        for name, value in (("proximal_method", "reuse"), ("fresh_proximal", "policy")):
            if getattr(self, name) == value and steps > 1:
                raise ValueError(
                    f"{name}={value!r} with {steps} optimizer steps a generation batch would move the trust region "
                    f"along with the policy: set num_iterations=1 and steps_per_generation <= "
                    "gradient_accumulation_steps, or choose another value."
                )

    def _check_rival(self):
        if self.loss_type not in RIVAL_LOSS_TYPES:
            raise ValueError(
                f"loss_type={self.loss_type!r} brings a ratio or weight of its own, which objective="
                f"{self.objective!r} replaces: set one of {', '.join(map(repr, RIVAL_LOSS_TYPES))}."
            )
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r} with objective={self.objective!r} "
                "cannot hold, because its weights are those of single tokens: set 'token'."
            )
        if self.delta is not None:
            raise ValueError(
                f"delta={self.delta!r} would cap r, which is not the policy ratio of objective={self.objective!r}: "
                "leave it out and set the bound of the objective."
            )
        if self.objective != "masked_is":
            return
        if self.proximal_method not in ("reuse", "recompute"):
            raise ValueError(
                f"objective='masked_is' weighs the policy at take against the behavior policy, which proximal_method="
                f"{self.proximal_method!r} is not: set 'reuse' (one optimizer step a batch) or 'recompute'."
            )
        if self.proximal_method == "reuse" and self.optimizer_steps_per_generation > 1:
            raise ValueError(
                f"proximal_method='reuse' with {self.optimizer_steps_per_generation} optimizer steps a generation "
                "batch would move the trust region along with the policy: set 'recompute', or num_iterations=1 and "
                "steps_per_generation <= gradient_accumulation_steps."
            )

    def _check_balanced(self):
        """ASymPO and SPO rest on the sum of a group's advantages being zero: refuse what changes it unseen."""
        needs = {
            "loss_type": ("grpo", "the mean over each completion, then over completions"),
            "importance_sampling_level": ("token", "no ratio at all"),
            "scale_rewards": ("none", "advantages that are only centred"),
            "multi_objective_aggregation": ("sum_then_normalize", "advantages centred within their group"),
            "mask_truncated_completions": (False, "every completion of a group"),
            "top_entropy_quantile": (1.0, "every token of a completion"),
            "off_policy_mask_threshold": (None, "every completion of a group"),
            "delta": (None, "no ratio at all"),
        }
        for name, (needed, why) in needs.items():
            value = getattr(self, name)
            if value != needed:
                raise ValueError(
                    f"objective={self.objective!r} needs {why}, which {name}={value!r} breaks: set {name}={needed!r}."
                )

    def _check_fixed_lag(self):
        micro_steps = self.steps_per_generation * self.num_iterations
        steps, rest = divmod(micro_steps, self.gradient_accumulation_steps)
        if rest:
            raise ValueError(
                f"schedule='fixed_lag' needs whole optimizer steps a generation batch, but {micro_steps} micro-steps "
                f"with gradient_accumulation_steps={self.gradient_accumulation_steps} are not: set "
                "steps_per_generation to a multiple of gradient_accumulation_steps."
            )
        if self.max_staleness % steps:
            raise ValueError(
                f"schedule='fixed_lag' with {steps} optimizer steps a generation batch has policies every {steps} "
                f"steps, and none max_staleness={self.max_staleness} steps before a batch: set max_staleness to a "
                f"multiple of {steps}."
            )
        if self.weight_sync_steps > steps:
            raise ValueError(
                f"schedule='fixed_lag' publishes for every generation batch, which weight_sync_steps="
                f"{self.weight_sync_steps} would skip: set weight_sync_steps={steps}."
            )

    def _check_periodic(self):
        """What keeps a period's gradient a sum over its groups, whichever of them meet in a micro-step, or raise."""
        accumulation = self.gradient_accumulation_steps
        one_step = f"one optimizer step a period (gradient_accumulation_steps={accumulation})"
        early = "advantages that are known when a group is finished"
        sum_of_groups = "a loss that does not depend on which groups meet in a micro-step"
        for name, breaks, why, instead in (
            ("num_iterations", self.num_iterations != 1, one_step, 1),
            ("steps_per_generation", self.steps_per_generation != accumulation, one_step, accumulation),
            ("weight_sync_steps", self.weight_sync_steps != 1, "a publish at the start of every period", 1),
            ("scale_rewards", self.scale_rewards == "batch", early, "group"),
            (
                "multi_objective_aggregation",
                self.multi_objective_aggregation == "normalize_then_sum",
                early,
                "sum_then_normalize",
            ),
            ("loss_type", self.loss_type == "bnpo", sum_of_groups, "dapo"),
            ("objective", self.objective == "m2po", sum_of_groups, "aipo"),
            ("top_entropy_quantile", self.top_entropy_quantile < 1, sum_of_groups, 1.0),
            ("entropy_coef", self.entropy_coef != 0, sum_of_groups, 0.0),
            ("use_adaptive_entropy", self.use_adaptive_entropy, sum_of_groups, False),
        ):
            if breaks:
                raise ValueError(
                    f"schedule='periodic' needs {why}, which {name}={getattr(self, name)!r} breaks: set "
                    f"{name}={instead!r}, or schedule='sync'."
                )
        rows = self.generation_batch_size // self.steps_per_generation
        if rows % self.num_generations:
            raise ValueError(
                f"schedule='periodic' trains whole groups in each micro-step, but the {rows} completions that "
                f"per_device_train_batch_size={self.per_device_train_batch_size} makes of it on all processes are not "
                f"a multiple of num_generations={self.num_generations}: set per_device_train_batch_size so that they "
                "are."
            )

    def _check_staleness(self):
        if self.schedule == "periodic":
            self._check_periodic()
        if self.schedule == "fixed_lag":
            self._check_fixed_lag()
        steps = self.optimizer_steps_per_generation
        if starves(self.weight_sync_steps, steps, self.staleness_bound):
            bound = f"max_staleness={self.max_staleness}" if self.schedule != "sync" else "schedule='sync'"
            needed = self.weight_sync_steps - math.gcd(self.weight_sync_steps, steps)
            raise ValueError(
                f"weight_sync_steps={self.weight_sync_steps} with {steps} optimizer steps a generation batch and "
                f"{bound} can never fill a batch, because the engine's weights would be older than allowed: set "
                f"weight_sync_steps={steps}, or max_staleness={needed} or more."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
