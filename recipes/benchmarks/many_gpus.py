"""A3POTrainer on several GPUs: how long the parts of a step take, and how throughput scales with the GPUs that train.

    python recipes/benchmarks/many_gpus.py --arms 1+1 3+1 2+2 3z+1          # the default arms
    python recipes/benchmarks/many_gpus.py --arms 3z+1 3z:grpo 3z:grpo:lora # ZeRO-3 beside GRPOTrainer's
    python recipes/benchmarks/many_gpus.py --arms 2 2z 2z:grpo 2z:lora 2f    # the same on 2 GPUs, and FSDP2
    python recipes/benchmarks/many_gpus.py --shape tiny --arms 1+1 --cpu    # to try the script

An arm `3z+1` trains on 3 GPUs with ZeRO-3 and generates on 1 more; with `f` instead of the `z` it is FSDP2, without
both DDP, and `3z` generates on the first of its GPUs while training waits (`schedule="sync"`). After it, `:lora`
trains a rank-16 adapter, `:padded` pads as TRL does, and `3z:grpo` is GRPOTrainer on 3 GPUs, which is given
completions of the same lengths, so that its step is training alone: compare it with `train`. Random weights of the
shape, bf16, completions of equal length. For an arm that times out, the report holds the steps measured before that.

`step`, `wait` (for a batch), `publish` and `train` (the rest) are seconds; `trainer idle` is the share of a step that
is `wait`, `engine blocked` that in which `max_staleness` kept the engine from its next prompt; `gathers` are ZeRO-3's
collectives for weights in a step, `GiB` the first trainer's peak of memory.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from arms import add_arguments, end_arm, first_token_reward, mean, prompts, run_arms, step_clock, step_notes

SHAPES = {  # layers, hidden, intermediate, heads, key-value heads, tied embeddings
    "tiny": (2, 64, 128, 4, 2, True),
    "small": (2, 256, 512, 2, 1, False),
    "0.6b": (28, 1024, 3072, 16, 8, True),
    "1.5b": (28, 1536, 8960, 12, 2, True),
    "4b": (36, 2560, 9728, 32, 8, True),
    "8b": (36, 4096, 12288, 32, 8, False),
    "14b": (40, 5120, 17408, 40, 8, False),
    "32b": (64, 5120, 25600, 64, 8, False),
}
NOT_CHECKPOINTED = ("tiny", "small", "0.6b", "1.5b")  # without gradient checkpointing
COLUMNS = (
    *("step", "wait", "publish", "train", "tokens/s", "engine tokens/s", "trainer idle", "engine blocked", "gathers"),
    "GiB",
)
WARM = 2  # steps that are not measured


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, arms=["1+1", "3+1", "2+2", "3z+1"], timeout=240.0, json="many_gpus.json")
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--completions", type=int, default=192, help="completions an optimizer step")
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="tokens a completion")
    parser.add_argument("--slots", type=int, default=192)
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after two")
    parser.add_argument("--cpu", action="store_true", help="gloo on a CPU, to try the script")
    return parser.parse_args()


@dataclass(frozen=True)
class Arm:
    """The parts of `3z+1:lora`: processes that train, `z` for ZeRO-3 or `f` for FSDP2, devices that generate, and
    options."""

    trains: int
    sharded: str
    generates: int
    options: frozenset[str]

    @classmethod
    def of(cls, name: str) -> "Arm":
        found = re.fullmatch(r"(\d)([zf]?)(?:\+(\d))?((?::(?:lora|grpo|padded))*)", name)
        if found is None:
            raise ValueError(f"The arm {name!r} is not known: give one like 3+1, 3z+1:lora, 3z:grpo or 2f.")
        trains, sharded, generates, options = found.groups()
        return cls(int(trains), sharded, int(generates or 0), frozenset(options.split(":")[1:]))


# --- one process of an arm ----------------------------------------------------------------------------------------


def train(arguments) -> None:
    from accelerate.state import DistributedType, PartialState
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig

    from trl_a3po import A3POConfig, A3POTrainer

    arm, cpu = Arm.of(arguments.arm), arguments.cpu
    if cpu and arm.sharded == "f":  # which accelerate has for accelerators alone
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    tokenizer = word_tokenizer()
    settings = {
        "output_dir": str(Path(arguments.folder) / "run"),
        "per_device_train_batch_size": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.completions // arm.trains // arguments.micro_batch,
        "num_generations": 8,
        "max_completion_length": arguments.tokens,
        "max_steps": arguments.steps + WARM,
        "learning_rate": 1e-6,
        "gradient_checkpointing": arguments.shape not in NOT_CHECKPOINTED,
        "use_cpu": cpu and not arm.sharded,
        "ddp_backend": "gloo" if cpu else "nccl",
        "bf16": not cpu,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if "grpo" in arm.options:
        trainer_class, args = completing_trainer(arguments.tokens), GRPOConfig(**settings)
    else:
        trainer_class = A3POTrainer
        args = A3POConfig(
            **settings,
            log_all_metrics=True,
            generation_kwargs={"min_new_tokens": arguments.tokens},
            **generating(arm, cpu),
            engine_slots=arguments.slots,
            engine_dtype="float32" if cpu else "bfloat16",
            packed_forward="off" if "padded" in arm.options else "auto",
        )
    model = random_model(arguments.shape, len(tokenizer), torch.float32 if cpu else torch.bfloat16, arm.sharded == "z")
    steps: list[float] = []
    gathers: list[int] = []
    count = counted_gathers() if arm.sharded == "z" else lambda: 0

    class Gathers(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            gathers.append(count())

    trainer = trainer_class(
        model,
        first_token_reward,
        args=args,
        train_dataset=prompts(arguments.prompt_tokens, len(tokenizer)),
        processing_class=tokenizer,
        callbacks=[step_clock(steps), Gathers()],
        peft_config=LoraConfig(r=16, target_modules="all-linear") if "lora" in arm.options else None,
    )

    def measured() -> dict[str, float]:
        seconds, history = mean(steps[WARM:]), trainer.state.log_history
        result = dict.fromkeys(("wait", "publish", "engine tokens/s", "trainer idle", "engine blocked"), 0.0)
        if "grpo" not in arm.options:
            result = engine_side([entry for entry in history if "a3po/time/wait" in entry], seconds)
        return result | {
            "steps": len(steps[WARM:]),
            "step": seconds,
            "train": seconds - result["wait"] - result["publish"],
            "tokens/s": arguments.completions * arguments.tokens / seconds,
            "gathers": (gathers[-1] - gathers[WARM - 1]) / len(gathers[WARM:]),
            "GiB": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
        }

    trainer.add_callback(step_notes(arguments, WARM, measured))
    trainer.train()
    end_arm(arguments, measured() if trainer.is_world_process_zero() else None)


def generating(arm: Arm, cpu: bool) -> dict:
    """Settings that say where and when an arm generates."""
    if not arm.generates:
        return {"engine_device": "cpu" if cpu else "cuda:0", "schedule": "sync"}
    devices = ["cpu" if cpu else f"cuda:{arm.trains + number}" for number in range(arm.generates)]
    return {"engine_device": devices, "max_staleness": 2}


def engine_side(history: list[dict[str, float]], seconds: float) -> dict[str, float]:
    """Results of a run from A3POTrainer's log; each of its steps takes `seconds`."""
    first, measured = history[0], history[WARM:]
    wait, publish, blocked = (
        mean(entry[f"a3po/time/{name}"] for entry in measured) for name in ("wait", "publish", "blocked")
    )
    return {
        "wait": wait,
        "publish": publish,
        "engine tokens/s": measured[-1]["a3po/engine/tokens_per_second"],
        "trainer idle": wait / seconds,
        "engine blocked": blocked / seconds,
        "engine start": first["a3po/time/engine_start"],
        "engine gap": first["a3po/engine_gap/mean"],
    }


def completing_trainer(tokens: int):
    """A GRPOTrainer that is given completions of `tokens` tokens."""
    from trl import GRPOTrainer

    class CompletingTrainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            vocab = len(self.processing_class)
            rows = range(len(prompt_ids))
            return [[3 + (89 * row + 37 * place) % (vocab - 3) for place in range(tokens)] for row in rows], None

    return CompletingTrainer


def counted_gathers():
    """A function that returns how many collectives of this process have gathered partitioned weights since this
    call."""
    from deepspeed.runtime.zero import partition_parameters

    inner, calls = partition_parameters._dist_allgather_fn, []

    def gather(*args, **kwargs):
        calls.append(None)
        return inner(*args, **kwargs)

    partition_parameters._dist_allgather_fn = gather
    return lambda: len(calls)


def word_tokenizer(vocab: int = 32768):
    """A tokenizer whose tokens are the words `t3`, `t4`, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Not `t0` to `t2`: the tokenizer finds a special token inside of words that begin with it.
    names = ["<pad>", "<eos>", "<unk>", *(f"t{i}" for i in range(3, vocab))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def random_model(shape: str, vocab: int, dtype: torch.dtype, zero: bool):
    """A model of this shape with normally distributed weights. Under ZeRO-3 no process holds all of it at any time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers, hidden, intermediate, heads, key_value, tied = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value,
        head_dim=128 if shape != "tiny" else 16,
        tie_word_embeddings=tied,
        max_position_embeddings=16384,
        eos_token_id=1,
        pad_token_id=0,
        dtype=dtype,
    )
    torch.manual_seed(0)
    if not zero:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return Qwen3ForCausalLM._from_config(config, dtype=dtype).to("cpu")
    import deepspeed
    from transformers.initialization import no_init_weights

    plain = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=plain, dtype=dtype), no_init_weights():
        model = Qwen3ForCausalLM(config)
        model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.ds_tensor.fill_(1.0) if "norm" in name else parameter.ds_tensor.normal_(0.0, 0.02)
    return model


def zero_config() -> dict:
    return {
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "overlap_comm": True},
    }


# --- all arms -----------------------------------------------------------------------------------------------------


def environment(arm: str, folder: Path, cpu: bool) -> dict[str, str]:
    sharded = Arm.of(arm).sharded
    if sharded == "f":
        return {
            "ACCELERATE_USE_FSDP": "true",
            "ACCELERATE_MIXED_PRECISION": "no" if cpu else "bf16",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
            **({"ACCELERATE_TORCH_DEVICE": "cpu"} if cpu else {}),
        }
    if not sharded:
        return {}
    config = folder / "zero3.json"
    config.write_text(json.dumps(zero_config()))
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config),
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
        "ACCELERATE_MIXED_PRECISION": "no" if cpu else "bf16",
    }


def main():
    arguments = parse_arguments()
    if arguments.arm:
        train(arguments)
    run_arms(
        arguments,
        COLUMNS,
        processes=lambda arm: Arm.of(arm).trains,
        environment=lambda arm, folder: environment(arm, folder, arguments.cpu),
    )


if __name__ == "__main__":
    main()
