"""Completions that end by themselves, few of them late: GRPOTrainer, AsyncGRPOTrainer and A3POTrainer on one workload.

    python recipes/benchmarks/ragged_lengths.py                                      # two GPUs, a 0.6B shape
    python recipes/benchmarks/ragged_lengths.py --arms grpo:1 a3po:1 --lengths equal # one GPU for both
    python recipes/benchmarks/ragged_lengths.py --tokens 8192 --vocabulary 4096      # long completions
    python recipes/benchmarks/ragged_lengths.py --shape 8b --arms grpo:lora a3po:lora a3po:lora:recompute
    python recipes/benchmarks/ragged_lengths.py --shape tiny --cpu --arms a3po:transformers --tokens 32

Random weights with a vocabulary of 512 tokens, one of which ends a completion: lengths are geometric, with a mean of
about 450 tokens, and cut at `--tokens`; a larger `--vocabulary` makes them longer. With `--lengths equal`, every
completion has `--tokens` tokens. The first GPU trains and the second one generates, with vLLM; the option `:1` lets
both share the first one.

`grpo` is GRPOTrainer with a vLLM server (`:1`: colocated). `async_grpo` is TRL's AsyncGRPOTrainer with a server; it
loads FlashAttention 3 from the Hub, and `torch`'s own kernel takes its place here. `a3po` has the options
`recompute` (the proximal policy by a forward), `sync` (no asynchrony), `transformers` (the engine) and `tp` (vLLM
with tensor parallelism on the second and third GPU, or, with `:1:tp`, on both of two GPUs). The option `lora` trains
a rank-16 adapter. Its `bound` is what no schedule can do better: the seconds that the engine needs for the tokens of
a step at the rate at which it samples, or those of training and publishing, if they are more. With `:1` each slows
the other down, so there is none.

`step`, `wait` (for a batch), `publish` and `train` (the rest) are seconds per optimizer step, those that
AsyncGRPOTrainer logs for itself; `tokens/s` are trained completion tokens.
"""

import argparse
import sys

import torch
from arms import add_arguments, end_arm, first_token_reward, mean, prompts, run_arms, step_clock, step_notes
from many_gpus import SHAPES, random_model, word_tokenizer
from vllm_publish import WARM, common, grpo_with_vllm, saved, serving

COLUMNS = ("step", "wait", "publish", "publish max", "train", "tokens/s", "length", "trainer idle")
OPTIONS = {
    "grpo": {"1", "lora"},
    "async_grpo": set(),
    "a3po": {"1", "lora", "recompute", "sync", "tp", "transformers"},
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arms = ["a3po", "a3po:recompute", "grpo", "async_grpo", "a3po:transformers"]
    add_arguments(parser, arms=arms, timeout=240.0, json="ragged_lengths.json")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--lengths", choices=("ragged", "equal"), default="ragged")
    parser.add_argument("--completions", type=int, default=64, help="completions an optimizer step")
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--prompt_tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a completion, at most")
    parser.add_argument("--vocabulary", type=int, default=512, help="tokens, one of which ends a completion")
    parser.add_argument("--max_staleness", type=int, default=4)
    parser.add_argument("--slots", type=int, default=256, help="completions that the engine of an a3po arm decodes")
    parser.add_argument("--steps", type=int, default=12, help="measured steps")
    parser.add_argument("--cpu", action="store_true", help="to try the script")
    parser.add_argument("--vllm_python", default=sys.executable)
    parser.add_argument("--weights_dir", default="/dev/shm", help="each arm gets a folder in it")
    arguments = parser.parse_args()
    for arm in arguments.arms:
        way, *options = arm.split(":")
        if way not in OPTIONS or not set(options) <= OPTIONS[way]:
            parser.error(f"the arm {arm!r} is not known: give one of {OPTIONS}, options after colons")
    return arguments


# --- the process of an arm ----------------------------------------------------------------------------------------


def policy(arguments):
    tokenizer = word_tokenizer(arguments.vocabulary)
    dtype = torch.float32 if arguments.cpu else torch.bfloat16
    return tokenizer, random_model(arguments.shape, len(tokenizer), dtype, False)


def lengths_of(arguments) -> dict:
    return {"generation_kwargs": {"min_new_tokens": arguments.tokens}} if arguments.lengths == "equal" else {}


def adapter(options: set[str]):
    from peft import LoraConfig

    return LoraConfig(r=16, target_modules="all-linear") if "lora" in options else None


def generating(options: set[str]) -> str | list[str]:
    """The device, or devices, of the engine."""
    if "tp" in options:
        return ["cuda:0", "cuda:1"] if "1" in options else ["cuda:1", "cuda:2"]
    return "cuda:0" if "1" in options else "cuda:1"


def numbers(steps: list[float], waits: list[float], publishes: list[float], tokens: list[float]) -> dict[str, float]:
    """Of the measured steps, from the seconds and trained tokens of each step."""
    steps, waits, publishes, tokens = (values[WARM:] for values in (steps, waits, publishes, tokens))
    count = min(map(len, (steps, waits, publishes, tokens)))
    step, wait, publish = mean(steps), mean(waits), mean(publishes)
    return {
        "steps": count,
        "step": step,
        "wait": wait,
        "publish": publish,
        "publish max": max(publishes),
        "train": step - wait - publish,
        "tokens/s": mean(tokens) / step,
        "trainer idle": wait / step,
    }


def train_a3po(arguments, options: set[str]) -> dict[str, float]:
    from trl_a3po import A3POConfig, A3POTrainer

    (tokenizer, model), steps = policy(arguments), []
    engine = "transformers" if "transformers" in options else "vllm"
    args = A3POConfig(
        **common(arguments),
        **lengths_of(arguments),
        **({"schedule": "sync"} if "sync" in options else {"max_staleness": arguments.max_staleness}),
        proximal_method="recompute" if "recompute" in options else "loglinear",
        engine=engine,
        engine_device="cpu" if arguments.cpu else generating(options),
        engine_dtype="float32" if arguments.cpu else "bfloat16",
        engine_slots=arguments.slots,
        engine_max_prompt_tokens=2 * arguments.prompt_tokens,  # some words are two tokens
        log_all_metrics=True,
        **({"vllm_python": arguments.vllm_python, "vllm_gpu_memory_utilization": 0.4} if engine == "vllm" else {}),
        **({"vllm_tensor_parallel_size": 2} if "tp" in options else {}),
    )
    trainer = A3POTrainer(
        model,
        first_token_reward,
        args=args,
        train_dataset=prompts(arguments.prompt_tokens, len(tokenizer)),
        processing_class=tokenizer,
        callbacks=[step_clock(steps)],
        peft_config=adapter(options),
    )

    def measured() -> dict[str, float]:
        history = [entry for entry in trainer.state.log_history if "a3po/time/wait" in entry]
        lengths = [entry["completions/mean_length"] for entry in history]
        result = numbers(
            steps,
            [entry["a3po/time/wait"] for entry in history],
            [entry["a3po/time/publish"] for entry in history],
            [length * arguments.completions for length in lengths],
        )
        rate = history[-1]["a3po/engine/tokens_per_second"]
        if "1" not in options:
            result["bound"] = max(result["tokens/s"] * result["step"] / rate, result["train"] + result["publish"])
        return result | {
            "length": mean(lengths[WARM:]),
            "engine tokens/s": rate,
            "engine blocked": mean(entry["a3po/time/blocked"] for entry in history[WARM:]),
            "engine start": trainer.state.log_history[0]["a3po/time/engine_start"],
        }

    trainer.add_callback(step_notes(arguments, WARM, measured))
    trainer.train()
    return measured()


def train_grpo(arguments, options: set[str]) -> dict[str, float]:
    tokenizer, model = policy(arguments)

    def measured() -> dict[str, float]:
        name = "completions/mean_length"
        lengths = [entry[name] for entry in trainer.state.log_history if name in entry]
        tokens = [length * arguments.completions for length in lengths]
        return numbers(*times, tokens) | {"length": mean(lengths[WARM:])}

    equal = {"generation_kwargs": {"ignore_eos": True}} if arguments.lengths == "equal" else {}
    how = grpo_with_vllm(arguments, model, tokenizer, "1" in options, adapter(options), **equal)
    with how as (trainer, times):
        trainer.add_callback(step_notes(arguments, WARM, measured))
        trainer.train()
    return measured()


def use_torch_kernel() -> None:
    """Let `torch`'s kernel take the place of the FlashAttention 3 that AsyncGRPOTrainer loads from the Hub."""
    from trl.experimental.async_grpo import packing

    class Kernel:
        @staticmethod
        def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size):
            lengths = cu_q, cu_k, int(max_q), int(max_k)
            attend = torch.ops.aten._flash_attention_forward
            return attend(q, k, v, *lengths, 0.0, causal, False, scale=softmax_scale)[0]

    packing._flash_attn = lambda: Kernel


def train_async_grpo(arguments, options: set[str]) -> dict[str, float]:
    """TRL's AsyncGRPOTrainer. A sample may be a row of several; with one turn, it is a completion."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    use_torch_kernel()
    tokenizer, model = policy(arguments)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    text = {"content": {"close_pattern": "<eos>", "content": "text"}}
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": text}
    folder = saved(arguments, model, tokenizer)
    context = 2 * arguments.prompt_tokens + arguments.tokens
    settings = common(arguments)

    def measured() -> dict[str, float]:
        names = "perf/step_s", "perf/rollout_wait_s", "perf/weight_sync_s", "batch/trained_tokens_per_step"
        history = [entry for entry in trainer.state.log_history if names[0] in entry]
        lengths = [entry["sample/trained_tokens_mean"] for entry in history[WARM:]]
        return numbers(*([entry[name] for entry in history] for name in names)) | {"length": mean(lengths)}

    with serving(arguments, folder, context) as url:
        args = AsyncGRPOConfig(
            **settings,
            dtype="bfloat16",
            vllm_server_base_url=url,
            max_staleness=arguments.max_staleness,
            max_inflight_tasks=arguments.completions * arguments.max_staleness,
            token_budget=0,  # as many samples to a micro-batch as the other arms have
        )
        args._n_gpu = 1  # the other one is the server's
        rows = prompts(arguments.prompt_tokens, len(tokenizer))
        trainer = AsyncGRPOTrainer(
            str(folder),
            first_token_reward,
            args=args,
            train_dataset=rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
            processing_class=tokenizer,
            callbacks=[step_notes(arguments, WARM + 1, measured)],  # the first step has no seconds
        )
        trainer.train()
    return measured()


def train(arguments) -> None:
    way, *options = arguments.arm.split(":")
    how = {"grpo": train_grpo, "async_grpo": train_async_grpo, "a3po": train_a3po}[way]
    end_arm(arguments, how(arguments, set(options)))


def main():
    arguments = parse_arguments()
    if arguments.arm:
        train(arguments)
    # AsyncGRPOTrainer starts a process that must not find itself in a process group.
    launched = {"processes": lambda arm: 0 if arm == "async_grpo" else 1}
    run_arms(arguments, COLUMNS, folders=arguments.weights_dir, **launched)


if __name__ == "__main__":
    main()
