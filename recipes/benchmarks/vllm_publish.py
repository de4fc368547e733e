"""Training with engine="vllm": what a publish costs, and how long the parts of a step take.

    python recipes/benchmarks/vllm_publish.py                                 # on 2 GPUs: one trains, one generates
    python recipes/benchmarks/vllm_publish.py --arms whole:1 lora:1 grpo:1    # on 1 GPU, for both
    python recipes/benchmarks/vllm_publish.py --shape small --cpu --arms whole lora --vllm_python PYTHON  # to try it

`whole` publishes whole weights, `lora` a rank-16 adapter; `grpo` is GRPOTrainer with a server that it sends weights to
over NCCL, and `grpo:1` with vLLM in its own process (`vllm_mode="colocate"`). Random weights of the shape, bf16,
completions of equal length. Each arm runs in a separate process, with a timeout; for an arm that times out, the report
holds the steps measured before that.

`step`, `wait` (for a batch) and `publish` are seconds; `tokens/s` are sampled tokens over the seconds of a step,
`engine tokens/s` over those in which the engine had any to sample. `trainer idle` is the share of a step that is
`wait`, `engine blocked` that in which `max_staleness` kept the engine from its next prompt; of GRPOTrainer, that in
which it did not generate.
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from arms import add_arguments, end_arm, first_token_reward, mean, prompts, run_arms, step_clock, step_notes
from many_gpus import NOT_CHECKPOINTED, SHAPES, random_model, word_tokenizer
from torch.distributed.elastic.utils.distributed import get_free_port

COLUMNS = ("step", "wait", "publish", "GB/s", "tokens/s", "engine tokens/s", "trainer idle", "engine blocked")
WAYS = ("whole", "lora", "grpo")
WARM = 3  # steps that are not measured


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, arms=["whole", "lora", "grpo"], timeout=280.0, json="vllm_publish.json")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--completions", type=int, default=64, help="completions an optimizer step")
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--prompt_tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256, help="tokens a completion")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--kv_on_publish", default="keep")
    parser.add_argument("--cpu", action="store_true", help="to try the script")
    parser.add_argument("--vllm_python", default=sys.executable)
    arguments = parser.parse_args()
    for arm in arguments.arms:
        if arm.removesuffix(":1") not in WAYS:
            parser.error(f"the arm {arm!r} is not known: give some of {', '.join(WAYS)}, with ':1' for one GPU")
    return arguments


# --- the process of an arm ----------------------------------------------------------------------------------------


def common(arguments) -> dict:
    """Settings that GRPOConfig and A3POConfig share."""
    return {
        "output_dir": str(Path(arguments.folder) / "run"),
        "per_device_train_batch_size": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.completions // arguments.micro_batch,
        "num_generations": 8,
        "max_completion_length": arguments.tokens,
        "max_steps": arguments.steps + WARM,
        "learning_rate": 1e-6,
        "gradient_checkpointing": arguments.shape not in NOT_CHECKPOINTED,
        "use_cpu": arguments.cpu,
        "bf16": not arguments.cpu,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def train_a3po(arguments, way: str, one_gpu: bool) -> dict[str, float]:
    from peft import LoraConfig
    from transformers import TrainerCallback

    from trl_a3po import A3POConfig, A3POTrainer

    tokenizer, steps, published = word_tokenizer(), [], []
    model = random_model(arguments.shape, len(tokenizer), torch.float32 if arguments.cpu else torch.bfloat16, False)
    args = A3POConfig(
        **common(arguments),
        log_all_metrics=True,
        generation_kwargs={"min_new_tokens": arguments.tokens},
        max_staleness=2,
        engine="vllm",
        engine_device="cpu" if arguments.cpu else "cuda:0" if one_gpu else "cuda:1",
        engine_max_prompt_tokens=2 * arguments.prompt_tokens,  # some words are two tokens
        engine_dtype="float32" if arguments.cpu else "bfloat16",
        kv_on_publish=arguments.kv_on_publish,
        vllm_python=arguments.vllm_python,
        vllm_gpu_memory_utilization=0.4,
    )
    trainer = A3POTrainer(
        model,
        first_token_reward,
        args=args,
        train_dataset=prompts(arguments.prompt_tokens, len(tokenizer)),
        processing_class=tokenizer,
        callbacks=[step_clock(steps)],
        peft_config=LoraConfig(r=16, target_modules="all-linear") if way == "lora" else None,
    )

    class Published(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            stats = trainer._session.engine.stats()
            published.append((stats.publish_seconds, stats.extra))

    def measured() -> dict[str, float]:
        history = [entry for entry in trainer.state.log_history if "a3po/time/wait" in entry][WARM:]
        seconds, (_, extra) = mean(steps[WARM:]), published[-1]
        publish = mean(took for took, _ in published[WARM:])
        return {
            "steps": len(steps[WARM:]),
            "step": seconds,
            "wait": mean(entry["a3po/time/wait"] for entry in history),
            "publish": publish,
            "GB/s": extra["published_bytes"] / publish / 1e9,
            "tokens/s": arguments.completions * arguments.tokens / seconds,
            "engine tokens/s": history[-1]["a3po/engine/tokens_per_second"],
            "trainer idle": mean(entry["a3po/time/wait"] for entry in history) / seconds,
            "engine blocked": mean(entry["a3po/time/blocked"] for entry in history) / seconds,
            "engine start": trainer.state.log_history[0]["a3po/time/engine_start"],
            "engine gap": trainer.state.log_history[0]["a3po/engine_gap/mean"],
            **extra,
        }

    trainer.add_callback(Published())
    trainer.add_callback(step_notes(arguments, WARM, measured))
    trainer.train()
    return measured()


def train_grpo(arguments, one_gpu: bool) -> dict[str, float]:
    tokenizer = word_tokenizer()
    model = random_model(arguments.shape, len(tokenizer), torch.bfloat16, False)

    def measured() -> dict[str, float]:
        steps, generations, syncs = (values[WARM:] for values in times)
        seconds, sync, generation = mean(steps), mean(syncs), mean(generations)
        tokens = arguments.completions * arguments.tokens
        return {
            "steps": len(steps),
            "step": seconds,
            "wait": generation,
            "publish": sync,
            "GB/s": sum(p.numel() * p.element_size() for p in model.parameters()) / sync / 1e9,
            "tokens/s": tokens / seconds,
            "engine tokens/s": tokens / generation,
            "trainer idle": generation / seconds,
            "engine blocked": 1.0 - generation / seconds,
        }

    equal = {"generation_kwargs": {"ignore_eos": True}}
    with grpo_with_vllm(arguments, model, tokenizer, one_gpu, **equal) as (trainer, times):
        trainer.add_callback(step_notes(arguments, WARM, measured))
        trainer.train()
    return measured()


def saved(arguments, model, tokenizer) -> Path:
    """The folder that a server loads the policy from, which is also the model's name."""
    folder = Path(arguments.folder) / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.name_or_path = str(folder)
    return folder


@contextmanager
def grpo_with_vllm(
    arguments, model, tokenizer, one_gpu: bool, peft_config=None, **settings
) -> Iterator[tuple[Any, list[list[float]]]]:
    """A GRPOTrainer with vLLM, and the seconds of its steps, its generations and its transfers of weights. Wrappers
    around its methods measure the last two."""
    from trl import GRPOConfig, GRPOTrainer

    steps, generations, syncs = times = [[], [], []]
    folder, context = saved(arguments, model, tokenizer), 2 * arguments.prompt_tokens + arguments.tokens
    with nullcontext() if one_gpu else serving(arguments, folder, context) as url:
        args = GRPOConfig(
            **common(arguments),
            **settings,
            use_vllm=True,
            vllm_mode="colocate" if one_gpu else "server",
            vllm_server_base_url=url,
            vllm_gpu_memory_utilization=0.4,
            vllm_max_model_length=context,
        )
        trainer = GRPOTrainer(
            model,
            first_token_reward,
            args=args,
            train_dataset=prompts(arguments.prompt_tokens, len(tokenizer)),
            processing_class=tokenizer,
            callbacks=[step_clock(steps)],
            peft_config=peft_config,
        )
        generation = trainer.vllm_generation
        generation.sync_weights = timed(generation.sync_weights, syncs)
        generation.generate = timed(generation.generate, generations)
        yield trainer, times


@contextmanager
def serving(arguments, folder: Path, context: int) -> Iterator[str]:
    """The URL of a server on the second GPU, to which GRPOTrainer can send weights. An arm that is cut stops it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The arm is cut."))
    from vllm_server import VLLMServer

    from trl_a3po.engines.vllm.servers.startup import ServerRequirements

    requirements = ServerRequirements(
        str(folder),
        "bfloat16",
        context,
        context,
        ("processed_logprobs",),
        transfer="nccl",
        options={"--max-logprobs": "-1"},
    )
    log = folder.parent / "server.log"
    server = VLLMServer(arguments.vllm_python, requirements, torch.device("cuda:1"), log, port=get_free_port())
    try:
        server.wait_until_ready(arguments.timeout)
        yield server.server.url
    finally:
        server.stop()


def timed(function, seconds: list[float]):
    def run(*args, **kwargs):
        began = time.perf_counter()
        result = function(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        return result

    return run


def train(arguments) -> None:
    way, _, gpus = arguments.arm.partition(":")
    one_gpu = gpus == "1"
    end_arm(arguments, train_grpo(arguments, one_gpu) if way == "grpo" else train_a3po(arguments, way, one_gpu))


def main():
    arguments = parse_arguments()
    if arguments.arm:
        train(arguments)
    run_arms(arguments, COLUMNS)


if __name__ == "__main__":
    main()
