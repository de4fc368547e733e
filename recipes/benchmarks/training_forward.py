"""Tokens per second and memory of forward and backward: padded as in TRL, packed, and with shared prompts.

    python recipes/benchmarks/training_forward.py                          # one GPU; about five minutes on an H100
    python recipes/benchmarks/training_forward.py --shapes 0.6B --budget 90
    python recipes/benchmarks/training_forward.py --shapes tiny --lengths 48/24/4 --device cpu   # to try the script
    python recipes/benchmarks/training_forward.py --shapes 135M --lengths 36/6/8 --no_checkpointing   # the quickstart

One micro-batch is one group: a prompt of P tokens with G completions of at most R, for each P/R/G of `--lengths`.
Completion lengths are the quantiles of a log-normal (`--tail`, its sigma; 0 for equal lengths), the longest R: with
the default 0.8 and G = 8 the shortest is 0.09 R and the mean 0.38 R. Models have random weights in bfloat16, gradient
checkpointing on (TRL's default), and the shapes 135M and 8B a LoRA adapter on all linear layers.

Tokens per second count the tokens of the sequences without padding, and a prompt once for each completion, so that the
count does not depend on the layout. The predicted ratio is that of the cost model behind `shared_prompt="auto"`.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_a3po.forward.attention import install_packed_attention
from trl_a3po.forward.cost import ModelFlops, packed_flops, padded_flops
from trl_a3po.forward.layout import PackedBatch, pack, rows_by_prompt
from trl_a3po.forward.packed import packed_logps
from trl_a3po.models.unwrap import base_model

# name -> (model type, configuration, whether a LoRA adapter is trained); the shapes of SmolLM2-135M, Qwen3-0.6B,
# Qwen2.5-1.5B and Llama-3.1-8B.
SHAPES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "tiny": (
        "qwen3",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 512,
        },
        False,
    ),
    "135M": (
        "llama",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
            "tie_word_embeddings": True,
        },
        True,
    ),
    "0.6B": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
        False,
    ),
    "1.5B": (
        "qwen2",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
        False,
    ),
    "8B": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
        },
        True,
    ),
}
ARMS = ("padded", "packed", "shared")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "1.5B", "8B"], choices=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", default=["512/4096/8", "1024/1024/8", "4096/512/8"], metavar="P/R/G")
    parser.add_argument("--tail", type=float, default=0.8, help="sigma of the log-normal of completion lengths")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of an arm, after a warm-up run")
    parser.add_argument("--budget", type=float, default=280.0, help="seconds after which no further arm is started")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no_checkpointing", action="store_true", help="without gradient checkpointing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="outputs/training_forward.json")
    return parser.parse_args()


def build_model(name: str, device: str, context: int, checkpointing: bool):
    model_type, shape, lora = SHAPES[name]
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    config = AutoConfig.for_model(model_type, **shape, max_position_embeddings=context)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    install_packed_attention(model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if lora:
        adapter = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    if checkpointing:
        base = base_model(model)
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
    return model


def completion_lengths(longest: int, count: int, tail: float) -> list[int]:
    """Quantiles of a log-normal with the longest fixed."""
    normal = statistics.NormalDist()
    scores = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    return [max(1, round(longest * torch.tensor(tail * (z - scores[-1])).exp().item())) for z in scores]


def micro_batch(prompt: int, completions: list[int], vocab: int, device: str, seed: int):
    """`(input_ids, attention_mask)` as TRL pads a group, and T."""
    generator = torch.Generator().manual_seed(seed)
    width = max(completions)
    ids = torch.randint(3, vocab, (len(completions), prompt + width), generator=generator)
    ids[:, :prompt] = ids[0, :prompt]
    mask = torch.ones_like(ids)
    for row, length in enumerate(completions):
        mask[row, prompt + length :] = 0
    return ids.to(device), mask.to(device), width


def padded_logps(model, input_ids, attention_mask, width):
    """Log-probs by TRL's padded forward."""
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :-width] = -100
    outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -width:]


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def measure(model, logps_of, weights: torch.Tensor, device: str, repeats: int) -> dict[str, Any]:
    """Forward and backward, timed after a first one; and the log-probs and gradients of the first."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    seconds = []
    for run in range(repeats + 1):
        model.zero_grad(set_to_none=True)
        synchronize(device)
        started = time.perf_counter()
        logps = logps_of()
        (weights * logps).sum().backward()
        synchronize(device)
        if run == 0:
            first = logps.detach().float().cpu()
            gradients = [p.grad.cpu() for p in model.parameters() if p.requires_grad]
        else:
            seconds.append(time.perf_counter() - started)
        del logps
    peak = torch.cuda.max_memory_allocated() if cuda else None
    model.zero_grad(set_to_none=True)
    return {
        "seconds": min(seconds),
        "seconds_median": statistics.median(seconds),
        "peak_gib": None if peak is None else peak / 2**30,
        "peak_above_weights_gib": None if peak is None else (peak - before) / 2**30,
        "logps": first,
        "gradients": gradients,
    }


def run_case(model, arguments, lengths: str, deadline: float) -> dict[str, Any]:
    """All arms on one micro-batch."""
    prompt, longest, group = map(int, lengths.split("/"))
    completions = completion_lengths(longest, group, arguments.tail)
    base, device = base_model(model), arguments.device
    ids, mask, width = micro_batch(prompt, completions, base.config.vocab_size, device, arguments.seed)
    unshared = pack(mask.cpu(), width)
    shared = pack(mask.cpu(), width, rows_by_prompt(ids.cpu(), mask.cpu(), width))
    shape, scored = ModelFlops.of(base.config), sum(completions)
    predicted = {
        "padded": padded_flops(shape, group, prompt + width, scored),
        "packed": packed_flops(shape, unshared.row, scored),
        "shared": packed_flops(shape, shared.row, scored),
    }
    tokens = {"padded": ids.numel(), "packed": unshared.row.tokens, "shared": shared.row.tokens}
    useful = group * prompt + sum(completions)
    weights = torch.randn(mask[:, -width:].shape, generator=torch.Generator().manual_seed(1)).to(device)
    weights = weights * mask[:, -width:]

    def run_packed(layout: PackedBatch):
        layout.row.cache.clear()  # made again by every forward of a trainer
        return packed_logps(model, base, ids, layout, width)[0]

    calls = {
        "padded": lambda: padded_logps(model, ids, mask, width),
        "packed": lambda: run_packed(unshared),
        "shared": lambda: run_packed(shared),
    }
    arms: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for arm in ARMS:
        if time.perf_counter() > deadline:
            arms[arm] = {"skipped": "the budget was spent"}
            continue
        try:
            result = measure(model, calls[arm], weights, device, arguments.repeats)
        except torch.OutOfMemoryError as error:
            arms[arm] = {"failed": f"out of memory: {str(error).splitlines()[0][:200]}"}
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            continue
        kept[arm] = result.pop("logps"), result.pop("gradients")
        arms[arm] = result | {
            "tokens_run": tokens[arm],
            "tokens_per_second": useful / result["seconds"],
            "predicted_operations": predicted[arm],
        }
    for arm, layout in (("packed", unshared), ("shared", shared)):
        if arm in kept:
            arms[arm]["attention"] = layout.row.cache["kernel"]
    report = {"lengths": lengths, "completion_lengths": completions, "useful_tokens": useful, "arms": arms}
    return report | {"ratios": ratios(arms, predicted), "distances": distances(kept, mask[:, -width:].bool().cpu())}


def ratios(arms: dict[str, Any], predicted: dict[str, float]) -> dict[str, Any]:
    """Measured and predicted speed of one arm over another."""
    found = {}
    for slow, fast in (("padded", "packed"), ("packed", "shared"), ("padded", "shared")):
        both = all("seconds" in arms[arm] for arm in (slow, fast))
        found[f"{fast}/{slow}"] = {
            "predicted": predicted[slow] / predicted[fast],
            "measured": arms[slow]["seconds"] / arms[fast]["seconds"] if both else None,
        }
    return found


def distances(kept: dict[str, Any], scored: torch.Tensor) -> dict[str, Any]:
    """How far log-probs and the gradient, of all that is trained, are from the padded ones."""
    if "padded" not in kept:
        return {}
    logps, gradients = kept["padded"]
    norm = norm_of(gradients)
    return {
        arm: {
            "logps_mean": (theirs - logps)[scored].abs().mean().item(),
            "logps_max": (theirs - logps)[scored].abs().max().item(),
            "gradient_norm": norm,
            "gradient_relative": norm_of(
                a.float() - b.float() for a, b in zip(their_gradients, gradients, strict=True)
            )
            / norm,
        }
        for arm, (theirs, their_gradients) in kept.items()
        if arm != "padded"
    }


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """The norm of all tensors as one vector."""
    return math.sqrt(sum(tensor.float().square().sum().item() for tensor in tensors))


def show(name: str, case: dict[str, Any]) -> None:
    print(f"{name}  P/R/G {case['lengths']}  ({case['useful_tokens']} tokens)")
    for arm, result in case["arms"].items():
        if "seconds" not in result:
            print(f"  {arm:<8}{result.get('failed') or result.get('skipped')}")
            continue
        memory = "" if result["peak_gib"] is None else f"{result['peak_gib']:8.1f} GiB peak"
        print(
            f"  {arm:<8}{result['seconds'] * 1e3:10.1f} ms{result['tokens_per_second']:12.0f} tokens/s{memory}"
            f"  {result['tokens_run']} tokens run  {result.get('attention', '')}"
        )
    for pair, ratio in case["ratios"].items():
        measured = "-" if ratio["measured"] is None else f"{ratio['measured']:.2f}"
        print(f"  {pair:<16} predicted {ratio['predicted']:.2f}  measured {measured}")
    for arm, distance in case["distances"].items():
        print(
            f"  {arm:<8} log-probs differ by {distance['logps_mean']:.2g} on average, {distance['logps_max']:.2g} at "
            f"most; gradients by {distance['gradient_relative']:.2g} of their norm, {distance['gradient_norm']:.2g}"
        )


def main():
    arguments = parse_arguments()
    deadline = time.perf_counter() + arguments.budget
    torch.manual_seed(arguments.seed)
    device = arguments.device
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "torch": torch.__version__,
        "tail": arguments.tail,
        "gradient_checkpointing": not arguments.no_checkpointing,
        "shapes": {},
    }
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    context = max(int(p) + int(r) for p, r, _ in (lengths.split("/") for lengths in arguments.lengths))
    for name in arguments.shapes:
        if time.perf_counter() > deadline:
            print(f"{name}: skipped, the budget of {arguments.budget:g} s was spent")
            continue
        model = build_model(name, device, context, not arguments.no_checkpointing)
        results["shapes"][name] = cases = []
        for lengths in arguments.lengths:
            cases.append(run_case(model, arguments, lengths, deadline))
            show(name, cases[-1])
            output.write_text(json.dumps(results, indent=1))
        del model
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    print(f"saved {output}")


if __name__ == "__main__":
    main()
