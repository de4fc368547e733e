"""GRPOTrainer and A3POTrainer on the same work: how long the parts of a step take.

    python recipes/benchmarks/side_by_side.py                                    # completions of equal length
    python recipes/benchmarks/side_by_side.py --lengths geometric                # most end early, a few run long
    python recipes/benchmarks/side_by_side.py --reward_seconds 0.5               # rewards that take time, as a judge
    does python recipes/benchmarks/side_by_side.py --shape qwen3-0.6b --dtype bfloat16 --completions 64 --tokens 256  #
    GPU

Random weights of the given shape, the same prompts and batch sizes for every arm. On a CPU `--threads` is the total:
GRPOTrainer has all of them, A3POTrainer gives half to its engine. The columns are seconds per optimizer step, mean
over the steps after the warm-up: `wait` is generation and rewards for GRPOTrainer, waiting for them for A3POTrainer.
"""

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from trl_a3po import A3POConfig, A3POTrainer

SHAPES = {
    "small": {"hidden_size": 384, "num_hidden_layers": 8, "intermediate_size": 1024, "num_attention_heads": 6,
              "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192},
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
ARMS = {
    "GRPOTrainer": None,
    "sync": {"schedule": "sync"},
    "periodic": {"schedule": "periodic"},
    "async loglinear": {"proximal_method": "loglinear"},
    "async padded": {"packed_forward": "off"},  # loglinear too, trained as TRL trains
    "async reuse": {"proximal_method": "reuse"},
    "async recompute": {"proximal_method": "recompute"},
}
PARTS = ("wait", "forward", "backward", "publish")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--completions", type=int, default=32, help="completions an optimizer step")
    parser.add_argument("--generations", type=int, default=8, help="completions a prompt")
    parser.add_argument("--micro_batch", type=int, default=8, help="completions a forward and backward")
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="longest completion")
    parser.add_argument("--lengths", choices=["equal", "geometric"], default="equal")
    parser.add_argument("--reward_seconds", type=float, default=0.0, help="how long a reward function waits")
    parser.add_argument("--max_staleness", type=int, default=2)
    parser.add_argument(
        "--slots", type=int, help="completions A3POTrainer's engine decodes at a time; a small number slows it down"
    )
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="CPU threads of trainer and engine together"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json", help="write the numbers here")
    return parser.parse_args()


class Stopwatch(TrainerCallback):
    """Seconds of each part of each step; `measure` also wraps the methods where a part is spent."""

    def __init__(self):
        self.steps, self.now = [], dict.fromkeys(PARTS, 0.0)
        self.started = None

    @contextlib.contextmanager
    def part(self, name):
        _synchronize()
        began = time.perf_counter()
        yield
        _synchronize()
        self.now[name] += time.perf_counter() - began

    def measure(self, owner, method, name):
        inner = getattr(owner, method)

        def timed(*args, **kwargs):
            with self.part(name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)

    def on_step_begin(self, args, state, control, **kwargs):
        self.now, self.started = dict.fromkeys(PARTS, 0.0), time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        _synchronize()
        self.steps.append({**self.now, "step": time.perf_counter() - self.started})


def _synchronize():
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def make_model(arguments, folder):
    set_seed(0)
    settings = SHAPES[arguments.shape]
    config = Qwen3Config(
        **settings, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype))
    # Any of these tokens ends a completion of a random model, so lengths are geometric with a mean of `tokens / 3`.
    ends = int(config.vocab_size * 3 / arguments.tokens) if arguments.lengths == "geometric" else 1
    model.generation_config.eos_token_id = list(range(1, 1 + ends))
    # Not `t0` to `t2`: the tokenizer finds a special token inside of words that begin with it.
    names = ["<pad>", "<eos>", "<unk>", *(f"t{i}" for i in range(3, config.vocab_size))]
    vocab = {name: i for i, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return config.vocab_size


def run(name, arguments, folder, vocab_size) -> dict[str, float]:
    def reward(completion_ids, **kwargs):
        time.sleep(arguments.reward_seconds * len(completion_ids) / arguments.generations)
        return [ids[0] % 7 / 6 for ids in completion_ids]

    rows = [
        " ".join(f"t{3 + (97 * i + 31 * j) % (vocab_size - 3)}" for j in range(arguments.prompt_tokens))
        for i in range(512)
    ]
    settings = {
        "output_dir": f"{folder}/run",
        "per_device_train_batch_size": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.completions // arguments.micro_batch,
        "num_generations": arguments.generations,
        "max_completion_length": arguments.tokens,
        "max_steps": arguments.warmup + arguments.steps,
        "learning_rate": 1e-6,
        "bf16": arguments.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "model_init_kwargs": {"dtype": arguments.dtype},
        "generation_kwargs": {"min_new_tokens": arguments.tokens} if arguments.lengths == "equal" else None,
    }
    data = Dataset.from_dict({"prompt": rows})
    if ARMS[name] is None:
        torch.set_num_threads(arguments.threads)
        trainer = GRPOTrainer(folder, reward, args=GRPOConfig(**settings), train_dataset=data)
    else:
        half = max(1, arguments.threads // 2)
        torch.set_num_threads(half)
        args = A3POConfig(
            **settings,
            **ARMS[name],
            engine_slots=arguments.slots,
            max_staleness=arguments.max_staleness,
            engine_threads=arguments.threads - half or 1,
        )
        trainer = A3POTrainer(folder, reward, args=args, train_dataset=data)
    watch = Stopwatch()
    trainer.add_callback(watch)
    trainer.log = lambda *args, **kwargs: None
    watch.measure(trainer, "_prepare_inputs", "wait")
    watch.measure(trainer, "_compute_loss", "forward")
    watch.measure(trainer.accelerator, "backward", "backward")
    trainer.train()
    measured = watch.steps[arguments.warmup :]
    mean = {part: sum(step[part] for step in measured) / len(measured) for part in (*PARTS, "step")}
    if ARMS[name] is not None:
        published = trainer._metrics["train"]["a3po/time/publish"][arguments.warmup :]
        mean["publish"] = sum(published) / len(published)
        mean["wait"] -= mean["publish"]
    return mean


def main():
    arguments = parse_arguments()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = make_model(arguments, folder)
        results = {}
        for name in arguments.arms:
            results[name] = run(name, arguments, folder, vocab_size)
            console.print(f"{name}: {results[name]['step']:.2f} s a step")
    table = Table(
        "arm", *PARTS, "step", "against the first", title=f"seconds a step, {vars(arguments)}", title_justify="left"
    )
    first = next(iter(results.values()))["step"]
    for name, mean in results.items():
        table.add_row(name, *(f"{mean[part]:.2f}" for part in (*PARTS, "step")), f"{mean['step'] / first:.2f}x")
    console.print(table)
    if "sync" in results:
        sync = results["sync"]
        generation, training = sync["wait"], sync["step"] - sync["wait"]
        console.print(
            f"generation and rewards {generation:.2f} s, training {training:.2f} s: one after the other "
            f"{generation + training:.2f} s, ideally overlapped {max(generation, training):.2f} s a step"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"arguments": vars(arguments), "seconds": results}, indent=1))


if __name__ == "__main__":
    main()
