"""The runs that are held against each other: in one process, and in two with whatever spreads the training.

`torchrun … -m tests.distributed.runs FOLDER MODE [RUN …]`: the runs of `RUNS` in turn, with the tiny model in
`FOLDER/model`, or that with tied embeddings in `FOLDER/tied`, and the stub engine, so that completions do not depend
on the number of processes. What each of them trained is saved in `FOLDER/MODE/<run>`, with what it logged beside it.
"""

import gc
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, gather_object
from packaging.version import Version
from peft import LoraConfig
from torch.distributed import fsdp

from tests.episodes.chat import call, chat_model, chat_tokenizer, questions, results_in, said
from tests.images import pictured
from tests.runs import LENGTH, reward
from tests.tiny import VOCAB, tiny_prompts
from tests.vision import FAMILIES
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.models import fsdp_groups
from trl_a3po.publish import partitioned
from trl_a3po.testing import StubEngine, scripted_completion

ROWS_A_STEP, ACCUMULATION = 16, 2
BUCKET_BYTES = 10_000  # of the 138,000 of the tiny model, whose largest weight has 8,192
RUNS = {
    "full": {"delivery_check_steps": 1},
    "lora": {"lora": True, "delivery_check_steps": 1},
    "merged": {"lora": True, "lora_sync": "merged", "delivery_check_steps": 1},
    "grpo-kl": {"lora": True, "loss_type": "grpo", "beta": 0.04},
    "reference": {"beta": 0.04},
    "tied": {"tied": True, "beta": 0.04, "proximal_method": "recompute", "delivery_check_steps": 1},
    "tied-lora": {"tied": True, "lora": True, "proximal_method": "recompute", "delivery_check_steps": 1},
    "cut-groups": {"num_generations": 16},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "dr_grpo"},
    "shared-prompt": {"packed_forward": "on", "shared_prompt": "on"},
    "padded": {"packed_forward": "off"},
    "compared": {"compare_proximal_every": 1, "num_iterations": 2},
    "episodes": {"episodes": True, "max_completion_length": 400, "learning_rate": 0.05},
    "images": {"images": True, "beta": 0.0, "learning_rate": 0.05},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
}
KL = {"lora": True, "loss_type": "grpo", "beta": 0.04}
FSDP_RUNS = {"saved-head": {"saved": "lm_head", **KL}}
PERIODIC_RUNS = {
    "sync": {"schedule": "sync"},
    "periodic": {"schedule": "periodic"},
    "sync-kl": {"schedule": "sync", **KL},
    "periodic-kl": {"schedule": "periodic", **KL},
    "sync-rows": {"schedule": "sync", "loss_type": "dr_grpo"},
    "periodic-rows": {"schedule": "periodic", "loss_type": "dr_grpo"},
}
MODES = {
    "one": {"use_cpu": True},
    "ddp": {"use_cpu": True, "ddp_backend": "gloo"},
    "zero2": {"ddp_backend": "gloo"},
    "zero3": {"ddp_backend": "gloo"},
    "fsdp2": {"ddp_backend": "gloo"},
    "fsdp2-older": {"ddp_backend": "gloo"},  # with layers grouped as for torch before 2.13, whichever it is
    "fsdp2-bf16": {"ddp_backend": "gloo"},
    "fsdp2-hybrid": {"ddp_backend": "gloo"},  # two copies of the model, each sharded over half of the processes
    "fsdp2-offload": {"ddp_backend": "gloo"},  # weights, gradients and the optimizer's states in host memory
    "fsdp2-linear": {"ddp_backend": "gloo"},  # with every linear layer in a group of its own
    "fsdp2-gpu": {"delivery_check_steps": 1},  # by `accelerate launch`, on GPUs
    "fsdp2-full": {"ddp_backend": "gloo"},  # as a state dict that is saved whole, with weights that all processes load
    "launched": {"ddp_backend": "gloo"},  # by `accelerate launch` with a configuration
}


def compile_no_operator() -> None:
    """On CPUs, DeepSpeed compiles an operator for the inference of a model that is spread over them, for a minute or
    two. Nothing here uses it."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def use_deepspeed(folder: Path, stage: int) -> None:
    """As `accelerate launch --use_deepspeed` would."""
    compile_no_operator()
    config = {
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0,  # else a tiny model stays whole in every process
        },
    }
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps(config))
    os.environ |= {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
    }


def use(folder: Path, mode: str) -> None:
    """Set the environment as the launcher of `mode` would."""
    if mode.startswith("zero"):
        use_deepspeed(folder, int(mode[-1]))
    if mode == "launched":
        compile_no_operator()
    if mode.startswith("fsdp2") and mode != "fsdp2-gpu":
        full = mode.endswith("full")
        use_fsdp(
            FSDP_STATE_DICT_TYPE=f"{'FULL' if full else 'SHARDED'}_STATE_DICT",
            FSDP_CPU_RAM_EFFICIENT_LOADING=str(not full).lower(),
            ACCELERATE_MIXED_PRECISION="bf16" if mode.endswith("bf16") else "no",
        )
    if mode == "fsdp2-older":
        fsdp_groups.COMPLETES_GROUPS = Version("1000")
    if mode == "fsdp2-offload":
        os.environ["FSDP_OFFLOAD_PARAMS"] = "true"
        fsdp.CPUOffloadPolicy = Unpinned  # which accelerate imports when it reads its settings
    if mode == "fsdp2-linear":
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "Linear"
    if mode == "fsdp2-hybrid":
        os.environ |= {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        }


def use_fsdp(**settings: str) -> None:
    """As `accelerate launch --use_fsdp --fsdp_version 2` would, on CPUs: accelerate has FSDP for accelerators alone,
    so that it is told that this is one. All the rest is its own and torch's."""
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        **settings,
    }
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


@dataclass
class Unpinned(fsdp.CPUOffloadPolicy):
    """Memory is pinned for an accelerator, of which there is none."""

    pin_memory: bool = False


class MeasuringEngine(StubEngine):
    """Notes the most bytes of gathered weights that its process holds while it takes an update."""

    model: torch.nn.Module | None = None
    most_whole_bytes = 0

    def publish(self, update):
        for _ in update.tensors.items() if self.model is not None else ():
            whole = sum(p.nbytes for p in self.model.parameters() if p.numel() > 1)
            self.most_whole_bytes = max(self.most_whole_bytes, whole)
        super().publish(update)


class Steps:
    """An environment whose prompt and reward are known."""

    def reset(self, number, **row):
        self.sum = number % 3
        return f" {number}"

    def step(self, k: int) -> int:
        """Does a step.

        Args:
            k: its size

        Returns:
            the sum of the steps
        """
        self.sum += k
        return self.sum

    def get_reward(self):
        return float(self.sum)


def play(prompt_ids, number: int) -> list[int]:
    done = results_in(prompt_ids)
    return said(f"turn {done}" + call("step", k=done + number)) if done < number else said(f"end {number}")


def arguments(
    folder: Path, lora: bool, saved: str | None, tied: bool, episodes: bool, images: bool, evaluates: bool
) -> dict:
    """What a trainer is given beside its configuration."""
    layers = {"target_modules": "all-linear"}
    if saved is not None:  # a layer that is trained as a whole, beside an adapter
        layers = {"target_modules": ["q_proj"], "modules_to_save": [saved]}
    if episodes:
        environment = {"environment_factory": Steps, "reward_funcs": None}
        return {
            "model": chat_model(), "processing_class": chat_tokenizer(), "train_dataset": questions(32), **environment
        }  # fmt: skip
    if images:
        return {
            "model": str(folder / "images"),
            "processing_class": FAMILIES["qwen2_5_vl"].processor(),
            "reward_funcs": pictured.reward,
            "train_dataset": pictured.with_pictures([1, 2, 1, 3, 1, 1, 2, 1] * 2),
        }
    return {
        "model": str(folder / ("tied" if tied else "model")),
        "reward_funcs": reward,
        "train_dataset": tiny_prompts(),
        "eval_dataset": tiny_prompts(8) if evaluates else None,
        "peft_config": LoraConfig(r=4, **layers) if lora else None,
    }


def build(
    folder: Path,
    mode: str,
    processes: int,
    *,
    lora: bool = False,
    saved: str | None = None,
    tied: bool = False,
    episodes: bool = False,
    images: bool = False,
    **settings,
) -> A3POTrainer:
    complete = pictured.COMPLETE if images else play if episodes else scripted_completion(VOCAB, LENGTH)
    args = A3POConfig(
        log_all_metrics=True,
        **{
            "output_dir": str(folder / mode),
            "per_device_train_batch_size": ROWS_A_STEP // ACCUMULATION // processes,
            "gradient_accumulation_steps": ACCUMULATION,
            "num_generations": 4,
            "max_completion_length": LENGTH,
            "max_steps": 3,
            "schedule": "fixed_lag",  # or timing would decide which version samples what
            "max_staleness": 2,
            "optim": "sgd",
            "learning_rate": 0.3,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.5,
            "bf16": False,
            "save_strategy": "no",
            "logging_steps": 1,
            "delivery_check_steps": 0,
            "report_to": "none",
            "disable_tqdm": True,
            "model_init_kwargs": None if episodes else {"dtype": "float32"},
            "engine": MeasuringEngine(complete),
            **MODES[mode],
            **settings,
        },
    )
    torch.manual_seed(3)  # an adapter's initialisation
    return A3POTrainer(
        args=args, **arguments(folder, lora, saved, tied, episodes, images, "eval_strategy" in settings)
    )


def gathers_after_preparing(trainer: A3POTrainer) -> list[None]:
    """An entry for each collective that gathers weights in the forward and backward of the latest micro-step."""
    from deepspeed.runtime.zero import partition_parameters

    gathers: list[None] = []
    gather, prepare = partition_parameters._dist_allgather_fn, trainer._prepare_inputs

    def noted(*args, **kwargs):
        gathers.append(None)
        return gather(*args, **kwargs)

    def prepared(batch):
        inputs = prepare(batch)
        gathers.clear()
        return inputs

    partition_parameters._dist_allgather_fn, trainer._prepare_inputs = noted, prepared
    return gathers


def run(name: str, folder: Path, mode: str, processes: int) -> None:
    trainer = build(folder, mode, processes, **(RUNS | PERIODIC_RUNS | FSDP_RUNS)[name])
    engine = trainer.args.engine
    gathers = []
    if mode == "zero3":
        gathers = gathers_after_preparing(trainer)
        engine.model = trainer.accelerator.unwrap_model(trainer.model)
        partitioned.BUCKET_BYTES = BUCKET_BYTES
    forwards = []
    trainer.accelerator.unwrap_model(trainer.model).register_forward_hook(lambda *call: forwards.append(None))
    trainer.train()
    forwards, gathers = gather_object([len(forwards)]), len(gathers)
    trainer.save_model(str(folder / mode / name))
    if trainer.is_world_process_zero():
        log = {
            "history": trainer.state.log_history,
            "published": engine.published,
            "forwards": forwards,
            "gathers": gathers,
            "most_whole_bytes": engine.most_whole_bytes,
            "offloads": mode.startswith("fsdp2") and isinstance(trainer._fsdp_plugin.cpu_offload, Unpinned),
        }
        (folder / mode / name / "log.json").write_text(json.dumps(log))


def main() -> None:
    folder, mode, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:] or list(RUNS)
    processes = int(os.environ["WORLD_SIZE"])
    use(folder, mode)
    gc.freeze()  # accelerate collects garbage in every training
    for name in names:
        run(name, folder, mode, processes)
        # Each run sets accelerate up anew; the process group stays.
        AcceleratorState._reset_state()
        GradientState._reset_state()
    leave()


def leave() -> None:
    """End this process. With DeepSpeed on gloo an ordinary exit aborts now and then, whatever the trainer."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
