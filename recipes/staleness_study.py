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
import math
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from datasets import Dataset
from matplotlib.figure import Figure
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
COLOURS = {"loglinear": "#0072b2", "reuse": "#009e73", "behavior": "#d55e00"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--methods", nargs="+", choices=COLOURS, default=list(COLOURS))
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


def run(arguments, method: str, staleness: int, seed: int, folder: str) -> list[dict[str, float]]:
    """The log of one run, one entry per step."""
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
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def summary(history: list[dict[str, float]], staleness: int) -> dict[str, float]:
    """Statistics of the steps after the lag has been reached; reward and entropy are those of the last fifth."""
    stale, last = history[staleness:], history[-max(1, len(history) // 5) :]

    def mean(entries, key):
        return statistics.mean(entry[key] for entry in entries)

    widest = max(stale, key=lambda entry: entry["a3po/rho/max"])
    return {
        "reward": mean(last, "reward"),
        "entropy": mean(last, "entropy"),
        "clipped": mean(stale, "a3po/clip/low") + mean(stale, "a3po/clip/high"),
        "w min": min(entry["a3po/w/min"] for entry in stale),
        "w max": max(entry["a3po/w/max"] for entry in stale),
        "r min": min(entry["a3po/r/min"] for entry in stale),
        "r max": max(entry["a3po/r/max"] for entry in stale),
        "ESS": mean(stale, "a3po/ess"),
        "contraction": math.log(widest["a3po/r/max"]) / math.log(widest["a3po/rho/max"])
        if widest["a3po/rho/max"] > 1
        else math.nan,
    }


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


def draw(histories: dict[tuple[str, int], list[list[dict[str, float]]]], path: Path) -> None:
    """Reward, entropy and clipped tokens by step: a column for each staleness, a line for each method."""
    staleness = sorted({d for _, d in histories})
    figure = Figure(figsize=(4 * len(staleness), 8), layout="constrained")
    axes = figure.subplots(3, len(staleness), squeeze=False, sharex=True, sharey="row")
    panels = (
        ("reward", lambda entry: entry["reward"]),
        ("entropy", lambda entry: entry["entropy"]),
        ("clipped tokens", lambda entry: entry["a3po/clip/low"] + entry["a3po/clip/high"]),
    )
    for (method, d), runs in histories.items():
        for row, (_, value) in enumerate(panels):
            draw_method(axes[row][staleness.index(d)], method, [[value(entry) for entry in run] for run in runs])
    for column, d in enumerate(staleness):
        axes[0][column].set_title(f"staleness {d}", loc="left", fontweight="bold")
        axes[-1][column].set_xlabel("optimizer step")
    for row, (name, _) in enumerate(panels):
        axes[row][0].set_ylabel(name)
        for panel in axes[row]:
            panel.spines[["top", "right"]].set_visible(False)
    axes[0][-1].legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw_method(axes, method: str, runs: list[list[float]]) -> None:
    """The mean of the runs at each step, in a band from the smallest to the largest value."""
    by_step = list(zip(*runs, strict=True))
    steps, lows, highs = range(1, len(by_step) + 1), [min(values) for values in by_step], [max(v) for v in by_step]
    axes.fill_between(steps, lows, highs, color=COLOURS[method], alpha=0.15, linewidth=0)
    means = [statistics.mean(values) for values in by_step]
    axes.plot(steps, means, color=COLOURS[method], linewidth=1.8, label=method)


def main():
    arguments = parse_arguments()
    console, output = Console(width=130), Path(arguments.output)
    histories: dict[tuple[str, int], list[list[dict[str, float]]]] = {}
    cells = [(m, d, seed) for d in arguments.staleness for m in arguments.methods for seed in arguments.seeds]
    with tempfile.TemporaryDirectory() as folder:
        for method, staleness, seed in track(cells, description="runs", console=console):
            history = run(arguments, method, staleness, seed, folder)
            histories.setdefault((method, staleness), []).append(history)
    results = {key: [summary(history, key[1]) for history in runs] for key, runs in histories.items()}
    draw(histories, output / "staleness_study.png")
    shown = {f"{method}, d {d}": runs for (method, d), runs in results.items()}
    (output / "staleness_study.json").write_text(json.dumps({"arguments": vars(arguments), "runs": shown}, indent=1))
    console.print(table(results))
    for verdict in verdicts(results):
        console.print(verdict)
    console.print(f"Drawn in {output / 'staleness_study.png'}")


if __name__ == "__main__":
    main()
