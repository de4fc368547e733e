"""The effect of staleness, and how the loss corrects for it: a small study on a CPU, which you can repeat on your
model.

    python recipes/staleness_study.py                                  # 27 runs of seconds each; a figure and a table
    python recipes/staleness_study.py --staleness 0 4 --seeds 0        # a part of it
    python recipes/staleness_study.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 60 --learning_rate 1e-6

`schedule="fixed_lag"` trains every token at exactly the staleness d asked for, so nothing else differs between runs.
The policy is a small model with random weights, and the reward is the share of a completion's tokens whose id is a
multiple of 4: a quarter at first, and 1 at best. A model that you name gets the same reward.

Two predictions are tested: with the log-linear proximal policy the ratio r contracts as ρ^(1/d), so that
fewer tokens are clipped the staler they are, while PPO on the behavior policy ("behavior") clips more of them.
"""

import argparse
import json
import statistics
import tempfile
from itertools import pairwise

import torch
from datasets import Dataset
from learning.output import output_folder
from learning.report import draw
from learning.results import Result, columns, summary
from learning.runs import Run, kept
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    PrinterCallback,
    set_seed,
)

from trl_a3po import A3POConfig, A3POTrainer

WORDS, TOKENS, PROMPTS, GENERATIONS = 32, 8, 8, 8
METHODS = ("loglinear", "reuse", "behavior")
TASK = "multiples of 4"
COLUMNS = ("reward", "entropy", "clipped", "w min", "w max", "r min", "r max", "ESS", "contraction")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--model", help="a causal language model to use instead of the small one")
    parser.add_argument("--output", default="outputs/staleness_study")
    return parser.parse_args()


def small_policy(seed: int):
    """A random model over `WORDS` words, and its tokenizer."""
    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer


def run(arguments, method: str, staleness: int, seed: int, folder: str) -> Result:
    if arguments.model:
        model, tokenizer = arguments.model, AutoTokenizer.from_pretrained(arguments.model)
    else:
        model, tokenizer = small_policy(seed)

    def quarter(completion_ids, **kwargs):
        return [sum(token % 4 == 0 for token in ids) / len(ids) for ids in completion_ids]

    args = A3POConfig(
        output_dir=folder,
        schedule="fixed_lag",
        max_staleness=staleness,
        proximal_method=method,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=TOKENS,
        generation_kwargs={"min_new_tokens": TOKENS},
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        loss_type="grpo",
        seed=seed,
        logging_steps=1,
        log_all_metrics=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        delivery_check_steps=0,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"} if arguments.model else None,
    )
    rows = [f"w{i % WORDS} w{(7 * i + 3) % WORDS} w{(11 * i) % WORDS}" for i in range(256)]
    trainer = A3POTrainer(
        model, quarter, args=args, train_dataset=Dataset.from_dict({"prompt": rows}), processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)  # a line for every step
    trainer.train()
    steps = columns([kept(entry) for entry in trainer.state.log_history if "reward" in entry])
    return Result(Run(TASK, method, staleness, seed, arguments.learning_rate), steps, {"done": True})


def table(results: dict[tuple[str, int], list[dict[str, float]]]) -> Table:
    names = list(next(iter(results.values()))[0])
    shown = Table("method", "d", *names, title="mean over the seeds; contraction: log r / log ρ of the largest ρ")
    for (method, staleness), runs in results.items():
        shown.add_row(method, str(staleness), *(f"{statistics.mean(run[name] for run in runs):.3g}" for name in names))
    return shown


def verdicts(results: dict[tuple[str, int], list[dict[str, float]]]) -> list[str]:
    """The predictions, and whether these runs confirm or refute them."""
    means = {
        key: {name: statistics.mean(run[name] for run in runs) for name in runs[0]} for key, runs in results.items()
    }
    said = []
    stale = sorted(d for method, d in means if method == "loglinear" and d >= 2)
    for one, more in pairwise(stale):
        few, many = means["loglinear", more]["clipped"], means["loglinear", one]["clipped"]
        said.append(
            f"log-linear, d {one} -> {more}: clipped tokens {many:.2%} -> {few:.2%}: "
            f"{'fewer, as predicted' if few < many else 'not fewer: refuted here'}"
        )
    for d in stale:
        found = means["loglinear", d]["contraction"]
        agrees = abs(found - 1 / d) < 0.2 / d
        said.append(
            f"log-linear, d {d}: log r / log ρ is {found:.3f}, predicted 1/d = {1 / d:.3f}: "
            f"{'confirmed' if agrees else 'refuted'}"
        )
        if ("behavior", d) in means:
            plain, ours = means["behavior", d]["clipped"], means["loglinear", d]["clipped"]
            said.append(
                f"d {d}: PPO on the behavior policy clips {plain:.2%}, log-linear {ours:.2%} of the tokens: "
                f"{'more, as predicted' if plain > ours else 'not more: refuted here'}"
            )
    return said


def main():
    arguments = parse_arguments()
    console, output = Console(width=130), output_folder(arguments.output)
    runs: list[Result] = []
    cells = [(m, d, seed) for d in arguments.staleness for m in arguments.methods for seed in arguments.seeds]
    with tempfile.TemporaryDirectory() as folder:
        for method, staleness, seed in track(cells, description="runs", console=console):
            runs.append(run(arguments, method, staleness, seed, folder))
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    for one in runs:
        found = summary(one.steps, one.run.staleness)
        results.setdefault((one.run.method, one.run.staleness), []).append({name: found[name] for name in COLUMNS})
    draw(runs, TASK, output / "staleness_study.png")
    shown = {f"{method}, d {d}": seeds for (method, d), seeds in results.items()}
    (output / "staleness_study.json").write_text(json.dumps({"arguments": vars(arguments), "runs": shown}, indent=1))
    console.print(table(results))
    for verdict in verdicts(results):
        console.print(verdict)
    console.print(f"Drawn in {output / 'staleness_study.png'}")


if __name__ == "__main__":
    main()
