"""Completions of unequal length on several processes: seconds per step with rows balanced by cost, and without.

    torchrun --nproc_per_node 2 recipes/benchmarks/balanced_training.py                  # two GPUs, DDP, a 0.6B shape
    torchrun --nproc_per_node 2 recipes/benchmarks/balanced_training.py --shape tiny     # on a CPU, to try the script

Only training is timed. The completions are synthetic, with log-normal lengths (sigma 1, at most `--tokens`) and one
straggler of ten times the median length in every batch. Both arms train on the same completions. `cost` is the cost of
the costliest process's share over the mean, by `row_cost`.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from many_gpus import word_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

import trl_a3po.trainer
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.distributed.rank_shares import balanced_rows, imbalance, row_cost
from trl_a3po.protocol.engine import EngineStats, GroupFinished
from trl_a3po.protocol.records import Rollout

SHAPES = {  # layers, hidden, intermediate, heads, key-value heads
    "tiny": (2, 64, 128, 4, 2),
    "0.6b": (28, 1024, 3072, 16, 8),
}
GENERATIONS, PROMPT = 8, 64


class SyntheticEngine:
    """An engine that returns synthetic completions at once and ignores the policy."""

    def __init__(self, longest: int):
        self.longest, self.version, self.events = longest, 0, []

    def start(self, spec, sampling, update):
        self.version = update.version

    def publish(self, update):
        self.version = update.version

    def submit(self, requests):
        for request in requests:
            rng = random.Random(request.noise_key)
            lengths = [min(self.longest, 1 + int(rng.lognormvariate(5.0, 1.0))) for _ in range(GENERATIONS)]
            if request.noise_key % 16 == 0:
                lengths[0] = min(self.longest, 1480)  # the median is 148
            rollouts = [Rollout([5] * n, [-10.0] * n, [self.version] * n) for n in lengths]
            self.events.append(GroupFinished(request.request_id, rollouts))

    def wait(self, timeout):
        events, self.events = self.events, []
        time.sleep(0 if events else min(timeout, 0.001))
        return events

    def cancel(self, request_ids):
        pass

    def score(self, prompt_ids, completion_ids, timeout):
        raise NotImplementedError

    def stats(self):
        return EngineStats()

    def close(self):
        pass


class StepClock(TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)


def run(arguments, balanced: bool) -> dict[str, float]:
    cpu = not torch.cuda.is_available()
    processes, costs, tokens = int(os.environ["WORLD_SIZE"]), [], []

    def measured(groups, processes, hidden_size):
        rows = balanced_rows(groups, processes if balanced else 1, hidden_size)
        lengths = [len(group.prompt.token_ids) + len(group.rollouts[number].token_ids) for group, number in rows]
        costs.append(imbalance([row_cost(length, hidden_size) for length in lengths], processes))
        tokens.append(sum(lengths))
        return rows

    trl_a3po.trainer.balanced_rows = measured
    tokenizer = word_tokenizer()
    layers, hidden, intermediate, heads, key_value = SHAPES[arguments.shape]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value,
        head_dim=128 if not cpu else 16,
        max_position_embeddings=8192,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32 if cpu else torch.bfloat16)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        args = A3POConfig(
            output_dir=folder,
            per_device_train_batch_size=GENERATIONS,
            gradient_accumulation_steps=arguments.groups // processes,
            num_generations=GENERATIONS,
            max_completion_length=arguments.tokens,
            max_steps=arguments.steps + 2,
            engine=SyntheticEngine(arguments.tokens),
            delivery_check_steps=0,
            use_cpu=cpu,
            ddp_backend="gloo" if cpu else "nccl",
            bf16=not cpu,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        prompts = [" ".join(f"t{3 + (row + word) % 999}" for word in range(PROMPT)) for row in range(512)]
        trainer = A3POTrainer(
            model,
            lambda completion_ids, **kwargs: [len(ids) % 7 / 6 for ids in completion_ids],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    seconds = statistics.mean(clock.seconds[2:])
    return {"step": seconds, "tokens/s": statistics.mean(tokens[2:]) / seconds, "cost": statistics.mean(costs[2:])}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 completions per step")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens of a completion")
    parser.add_argument("--steps", type=int, default=8, help="measured steps, after two warm-up steps")
    parser.add_argument("--json", help="file to write the numbers to")
    arguments = parser.parse_args()
    results = {name: run(arguments, name == "balanced") for name in ("as they come", "balanced")}
    if int(os.environ["RANK"]) == 0:
        for name, result in results.items():
            print(f"{arguments.shape}, {name}: " + "  ".join(f"{key} {value:.4g}" for key, value in result.items()))
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"arguments": vars(arguments), "arms": results}, file, indent=1)
    os._exit(0)


if __name__ == "__main__":
    main()
