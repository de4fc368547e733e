"""How many tokens a second the `transformers` engine samples, and vLLM beside it.

    python recipes/benchmarks/engine_speed.py                                          # 64 and 256 sequences on a GPU
    python recipes/benchmarks/engine_speed.py --lengths geometric --rounds 4           # sequences end at all lengths
    python recipes/benchmarks/engine_speed.py --top_p 0.95
    python recipes/benchmarks/engine_speed.py --engines transformers vllm              # needs vLLM
    python recipes/benchmarks/engine_speed.py --shape small --dtype float32 --device cpu --tokens 32 --sequences 8

Random weights of the given shape. `--rounds` times as many sequences as are decoded at a time are submitted at once;
the first measurement of each row warms the engine up (with CUDA graphs, it captures them) and is reported as `first`.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

SHAPES = {
    "small": {"hidden_size": 384, "num_hidden_layers": 8, "intermediate_size": 1024, "num_attention_heads": 6,
              "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192},
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engines", nargs="+", choices=["transformers", "vllm"], default=["transformers"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[64, 256], help="decoded at the same time")
    parser.add_argument("--generations", type=int, default=8, help="completions a prompt")
    parser.add_argument("--prompt_tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256, help="longest completion")
    parser.add_argument("--lengths", choices=["equal", "geometric"], default="equal")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2, help="measurements after the first")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--json", help="write the numbers here")
    return parser.parse_args()


def make_model(arguments):
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[arguments.shape], max_position_embeddings=4096, tie_word_embeddings=True)
    with torch.device(arguments.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype))


def stop_ids(arguments) -> tuple[int, ...]:
    """Any of these tokens ends a completion of a random model: geometric lengths with a mean of `tokens / 3`."""
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    return tuple(range(3 * vocab_size // arguments.tokens)) if arguments.lengths == "geometric" else ()


def prompts(arguments, count: int, salt: int) -> list[tuple[int, ...]]:
    """New for each measurement: nothing is found in a prefix cache."""
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    numbers = torch.Generator().manual_seed(salt)
    shape = (count, arguments.prompt_tokens)
    return [tuple(row) for row in torch.randint(3, vocab_size, shape, generator=numbers).tolist()]


def transformers_speeds(arguments, model, slots: int):
    """Tokens a second of each measurement."""
    from trl_a3po.engines.transformers.transformers_engine import TransformersEngine
    from trl_a3po.protocol.engine import GroupRequest, SamplingSettings
    from trl_a3po.publish.collect import collect_weights, policy_spec

    engine = TransformersEngine(slots=slots, device=arguments.device)
    sampling = SamplingSettings(arguments.tokens, top_p=arguments.top_p, stop_token_ids=stop_ids(arguments))
    engine.start(policy_spec(model, model.dtype), sampling, collect_weights(model, 0, complete=True))
    groups = slots * arguments.rounds // arguments.generations
    try:
        for turn in range(1 + arguments.repeats):
            first = turn * groups
            asked = [
                GroupRequest(first + i, first + i, prompt, arguments.generations)
                for i, prompt in enumerate(prompts(arguments, groups, turn))
            ]
            began, left, tokens = time.perf_counter(), groups, 0
            engine.submit(asked)
            while left:
                for event in engine.wait(60.0):
                    left -= 1
                    tokens += sum(len(rollout.token_ids) for rollout in event.rollouts)
            yield tokens / (time.perf_counter() - began)
    finally:
        engine.close()


def vllm_speeds(arguments, folder: str, slots: int):
    """The same with vLLM's own `LLM.generate`."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype=arguments.dtype,
        max_num_seqs=slots,
        max_model_len=arguments.prompt_tokens + arguments.tokens,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.5,
    )
    sampling = SamplingParams(
        n=arguments.generations,
        temperature=1.0,
        top_p=arguments.top_p,
        max_tokens=arguments.tokens,
        stop_token_ids=list(stop_ids(arguments)),
        ignore_eos=not stop_ids(arguments),
        logprobs=0,
        detokenize=False,
    )
    groups = slots * arguments.rounds // arguments.generations
    for turn in range(1 + arguments.repeats):
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts(arguments, groups, turn)]
        began = time.perf_counter()
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        yield tokens / (time.perf_counter() - began)


def main():
    arguments = parse_arguments()
    model, rows = make_model(arguments), []
    table = Table("engine", "sequences", "first", "tokens/s", title=f"{vars(arguments)}", title_justify="left")
    with tempfile.TemporaryDirectory() as folder:
        if "vllm" in arguments.engines:
            model.save_pretrained(folder)
        for slots in arguments.sequences:
            for engine in arguments.engines:
                speeds = (
                    transformers_speeds(arguments, model, slots)
                    if engine == "transformers"
                    else vllm_speeds(arguments, folder, slots)
                )
                first, *rest = speeds
                rows.append({"engine": engine, "sequences": slots, "first": first, "tokens_per_second": max(rest)})
                table.add_row(engine, str(slots), f"{first:,.0f}", f"{max(rest):,.0f}")
                print(rows[-1], flush=True)
    Console().print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"arguments": vars(arguments), "rows": rows}, indent=1))
    os._exit(0)  # vLLM's own threads are not worth waiting for


if __name__ == "__main__":
    main()
