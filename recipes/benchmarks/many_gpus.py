"""A3POTrainer on several GPUs: where the seconds of a step go, and how it grows with the GPUs that train.

    python recipes/benchmarks/many_gpus.py --arms 1+1 3+1 2+2 3z+1          # all arms, one after the other
    python recipes/benchmarks/many_gpus.py --shape tiny --arms 1+1 --cpu    # to try the script

An arm `3z+1` trains on 3 GPUs with ZeRO-3 and generates on 1 more; without the `z` it is DDP. Random weights of the
shape, bf16, completions of equal length; `lora` in an arm's name (`3z+1:lora`) trains a rank-16 adapter. Every arm is
started as `torchrun` would, and has a time limit. `idle` are the shares of a step in which the trainer waits for
rollouts and in which the engine waits for admission.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SHAPES = {  # layers, hidden, intermediate, heads, key-value heads, tied embeddings
    "tiny": (2, 64, 128, 4, 2, True),
    "small": (2, 256, 512, 2, 1, False),
    "0.6b": (28, 1024, 3072, 16, 8, True),
    "1.5b": (28, 1536, 8960, 12, 2, True),
    "8b": (36, 4096, 12288, 32, 8, False),
    "14b": (40, 5120, 17408, 40, 8, False),
    "32b": (64, 5120, 25600, 64, 8, False),
}
COLUMNS = ("step", "wait", "publish", "train", "tokens/s", "engine tokens/s", "trainer idle", "engine blocked", "GiB")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=["1+1", "3+1", "2+2", "3z+1"])
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--completions", type=int, default=192, help="completions an optimizer step")
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="tokens a completion")
    parser.add_argument("--slots", type=int, default=192)
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after two")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds an arm may take")
    parser.add_argument("--cpu", action="store_true", help="gloo on a CPU, to try the script")
    parser.add_argument("--json", default="many_gpus.json", help="write the numbers here")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # of one process of an arm
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def meaning(arm: str) -> tuple[int, bool, int, bool]:
    """`3z+1:lora` -> processes that train, ZeRO-3, devices that generate, LoRA."""
    trains, zero, generates, lora = re.fullmatch(r"(\d)(z?)\+(\d)(:lora)?", arm).groups()
    return int(trains), bool(zero), int(generates), bool(lora)


# --- one process of an arm ----------------------------------------------------------------------------------------


def train(arguments) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback

    from trl_a3po import A3POConfig, A3POTrainer

    processes, zero, engines, lora = meaning(arguments.arm)
    folder, cpu = Path(arguments.folder), arguments.cpu
    tokenizer = word_tokenizer()
    vocab = len(tokenizer)
    args = A3POConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=arguments.completions // processes // arguments.micro_batch,
        num_generations=8,
        max_completion_length=arguments.tokens,
        generation_kwargs={"min_new_tokens": arguments.tokens},
        max_steps=arguments.steps + 2,
        max_staleness=2,
        learning_rate=1e-6,
        gradient_checkpointing=arguments.shape not in ("tiny", "small", "0.6b", "1.5b"),
        engine_device=["cpu"] * engines if cpu else [f"cuda:{processes + n}" for n in range(engines)],
        engine_slots=arguments.slots,
        engine_dtype="float32" if cpu else "bfloat16",
        use_cpu=cpu and not zero,
        ddp_backend="gloo" if cpu else "nccl",
        bf16=not cpu,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    model = random_model(arguments.shape, vocab, torch.float32 if cpu else torch.bfloat16, zero)
    steps: list[dict[str, float]] = []

    class Steps(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            steps.append({"step": time.perf_counter() - self.began})

    prompts = [
        " ".join(f"t{3 + (97 * row + 31 * word) % (vocab - 3)}" for word in range(arguments.prompt_tokens))
        for row in range(1024)
    ]
    trainer = A3POTrainer(
        model,
        lambda completion_ids, **kwargs: [ids[0] % 7 / 6 for ids in completion_ids],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Steps()],
        peft_config=LoraConfig(r=16, target_modules="all-linear") if lora else None,
    )
    trainer.train()
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    memories = trainer._team.gather(memory)
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "a3po/time/wait" in entry][2:]
        names = ("a3po/time/wait", "a3po/time/publish", "a3po/time/blocked")
        mean = {name: sum(entry[name] for entry in history) / len(history) for name in names}
        seconds = sum(step["step"] for step in steps[2:]) / len(steps[2:])
        tokens = arguments.completions * arguments.tokens
        result = {
            "step": seconds,
            "wait": mean["a3po/time/wait"],
            "publish": mean["a3po/time/publish"],
            "train": seconds - mean["a3po/time/wait"] - mean["a3po/time/publish"],
            "tokens/s": tokens / seconds,
            "engine tokens/s": history[-1]["a3po/engine/tokens_per_second"],
            "trainer idle": mean["a3po/time/wait"] / seconds,
            "engine blocked": mean["a3po/time/blocked"] / seconds,
            "GiB": max(memories),
            "engine start": trainer.state.log_history[0]["a3po/time/engine_start"],
            "engine gap": trainer.state.log_history[0]["a3po/engine_gap/mean"],
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
        }
        (folder / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # gloo's and NCCL's threads are not worth waiting for


def word_tokenizer(vocab: int = 32768):
    """Words `t3`, `t4`, …, a token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Not `t0` to `t2`: a special token is found inside of words that begin with it.
    names = ["<pad>", "<eos>", "<unk>", *(f"t{i}" for i in range(3, vocab))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def random_model(shape: str, vocab: int, dtype: torch.dtype, zero: bool):
    """A model of the shape with normal weights; under ZeRO-3 no process ever holds all of it."""
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
        max_position_embeddings=4096,
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


def launch(arm: str, arguments) -> dict[str, float] | str:
    processes, zero, _, _ = meaning(arm)
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if zero:
            config = Path(folder) / "zero3.json"
            config.write_text(json.dumps(zero_config()))
            environment |= {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config),
                "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
                "ACCELERATE_MIXED_PRECISION": "no" if arguments.cpu else "bf16",
            }
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
        command += [__file__, *sys.argv[1:], "--arm", arm, "--folder", folder]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=arguments.limit, check=False
            )
        except subprocess.TimeoutExpired as error:
            return f"took more than {arguments.limit:.0f} s: {(error.stdout or b'')[-1500:]!r}"
        result = Path(folder) / "result.json"
        if not result.is_file():
            return (done.stdout + done.stderr)[-5000:]
        return json.loads(result.read_text())


def main():
    arguments = parse_arguments()
    if arguments.arm:
        train(arguments)
    results = {}
    for arm in arguments.arms:
        began = time.perf_counter()
        results[arm] = launch(arm, arguments)
        Path(arguments.json).write_text(json.dumps({"arguments": vars(arguments), "arms": results}, indent=1))
        took = time.perf_counter() - began
        if isinstance(results[arm], str):
            print(f"{arm} ({took:.0f} s) failed:\n{results[arm]}", flush=True)
            continue
        numbers = "  ".join(f"{name} {results[arm][name]:.3g}" for name in COLUMNS)
        print(f"{arguments.shape} {arm} ({took:.0f} s): {numbers}", flush=True)


if __name__ == "__main__":
    main()
