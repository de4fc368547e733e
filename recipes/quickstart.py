"""A real language model learns to add by asynchronous RL, on a CPU, in a few minutes.

    python recipes/quickstart.py

SmolLM2-135M-Instruct, a LoRA adapter, and the two-term sums of reasoning-gym. While the trainer works on one batch,
the engine already samples the next ones, from weights up to `--max_staleness` optimizer steps old; the A-3PO loss
corrects for that. Prints answers before and after, and draws `run.png`.

Other models, other schedules:

    python recipes/quickstart.py --model Qwen/Qwen2.5-0.5B-Instruct     # where a hub is reachable; a GPU is used
    python recipes/quickstart.py --schedule sync                        # the same work without running ahead
    python recipes/quickstart.py --packed_forward off                   # padded, as in TRL: compare the time of a step
    python recipes/quickstart.py --engine vllm                          # vLLM, in a process of the trainer
    python recipes/quickstart.py --engine vllm --vllm_server_urls http://localhost:8000

A run that was stopped goes on, and a finished one trains longer:

    python recipes/quickstart.py --steps 60 --resume                    # from the newest checkpoint in --output_dir
"""

import argparse
import json
import time
from pathlib import Path

import reasoning_gym
import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback, set_seed

from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.report.history import read_history
from trl_a3po.report.plot_run import plot_run

PROMPTS, GENERATIONS = 4, 8  # a batch: 32 completions
HELD_OUT = 64  # sums that are never trained on
SAVE_STEPS = 10  # Ctrl-C and SIGTERM save too


class RewardBar(ProgressCallback):
    """The progress bar with a few metrics; all metrics are in `log_history.json`."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "reward" in logs:
            staleness, wait = logs["a3po/staleness/mean"], logs["a3po/time/wait"]
            self.training_bar.set_postfix_str(
                f"reward {logs['reward']:.2f}, {staleness:.1f} steps stale, waited {wait:.1f} s"
            )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub name; by default SmolLM2-135M-Instruct from the package index")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_staleness", type=int, default=2)
    parser.add_argument("--schedule", default="async", choices=["async", "sync"])
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--packed_forward", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    parser.add_argument("--engine_device", help="such as cuda:1; by default the trainer's")
    parser.add_argument("--vllm_server_urls", nargs="+", help="running servers; by default a process of its own")
    parser.add_argument("--vllm_python", help="interpreter of an environment with vLLM; by default this one")
    parser.add_argument("--output_dir", default="outputs/quickstart")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output_dir")
    arguments = parser.parse_args()
    if arguments.resume and not any(Path(arguments.output_dir).glob("checkpoint-*")):
        parser.error(f"--resume: {arguments.output_dir} has no checkpoint. Leave --resume out, or give --output_dir")
    return arguments


def sums(size: int, seed: int):
    return reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, size=size, seed=seed
    )


def as_prompt(tokenizer, expression: str) -> str:
    """A chat with the start of the answer, so that a small model completes the sum instead of chatting about it."""
    chat = [
        {"role": "system", "content": "Calculator."},
        {"role": "user", "content": f"What is {expression}?"},
        {"role": "assistant", "content": f"{expression} ="},
    ]
    return tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)


def as_dataset(tokenizer, entries) -> Dataset:
    return Dataset.from_list(
        [
            {
                "prompt": as_prompt(tokenizer, entry["metadata"]["expression"]),
                "expression": entry["metadata"]["expression"],
                "answer": entry["answer"],
            }
            for entry in entries
        ]
    )


SCORER = sums(1, 0)


def correct(completions, answer, **kwargs) -> list[float]:
    """The score of reasoning-gym: 1 for the number alone, and less where there is text around it."""
    return [SCORER.score_answer(c.strip(), {"answer": a}) for c, a in zip(completions, answer, strict=True)]


@torch.no_grad()
def greedy_answers(model, tokenizer, rows) -> list[str]:
    model.eval()
    inputs = tokenizer(list(rows["prompt"]), return_tensors="pt", padding=True, padding_side="left").to(model.device)
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def show(console, rows, before, after) -> None:
    table = Table("sum", "before", "after", "right answer", title="Held-out sums")
    for i in range(8):
        table.add_row(rows["expression"][i], repr(before[i].strip()), repr(after[i].strip()), rows["answer"][i])
    console.print(table)
    for name, answers in (("before", before), ("after", after)):
        score = sum(correct(answers, rows["answer"])) / len(rows)
        console.print(f"score on {len(rows)} held-out sums, {name}: {score:.2f}")


def main():
    arguments = parse_arguments()
    console = Console()
    on_gpu = torch.accelerator.is_available()
    if not on_gpu:
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # the engine has the other half of the cores
    set_seed(arguments.seed)

    path = arguments.model
    if path is None:
        from smollm2 import smollm2_path

        path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if on_gpu else torch.float32)

    held_out = as_dataset(tokenizer, sums(HELD_OUT, seed=10_000))
    known = set(held_out["expression"])
    train = as_dataset(tokenizer, sums(400, seed=arguments.seed)).filter(lambda row: row["expression"] not in known)

    args = A3POConfig(
        output_dir=arguments.output_dir,
        # asynchrony
        max_staleness=arguments.max_staleness,
        schedule=arguments.schedule,
        packed_forward=arguments.packed_forward,
        engine=arguments.engine,
        engine_device=arguments.engine_device,
        engine_slots=None if arguments.vllm_server_urls else 16,
        vllm_server_urls=arguments.vllm_server_urls,
        vllm_python=arguments.vllm_python,
        # a batch and its optimizer step
        per_device_train_batch_size=GENERATIONS,
        gradient_accumulation_steps=PROMPTS,
        num_generations=GENERATIONS,
        max_completion_length=6,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        gradient_checkpointing=False,  # short sequences: memory is no concern, time is
        # the rest
        logging_steps=1,
        save_steps=SAVE_STEPS,
        save_total_limit=1,
        report_to="none",
        seed=arguments.seed,
    )
    trainer = A3POTrainer(
        model,
        correct,
        args=args,
        train_dataset=train,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )

    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(RewardBar)

    before = greedy_answers(trainer.model, tokenizer, held_out)
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    console.print(f"trained to optimizer step {trainer.state.global_step} in {time.perf_counter() - started:.0f} s")
    show(console, held_out, before, greedy_answers(trainer.model, tokenizer, held_out))

    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    if len(rewards) >= 10:
        fifth = len(rewards) // 5
        first, last = sum(rewards[:fifth]) / fifth, sum(rewards[-fifth:]) / fifth
        console.print(f"mean reward of the first fifth of the steps: {first:.2f}, of the last fifth: {last:.2f}")

    folder = Path(arguments.output_dir)
    trainer.save_model(str(folder / "adapter"))
    history = read_history(folder)  # every metric; trainer.state.log_history has those of the console
    (folder / "log_history.json").write_text(json.dumps(history, indent=1))
    plot_run(history, folder / "run.png", title=f"{Path(path).name} learns sums ({arguments.schedule})")
    console.print(f"adapter, log and plot are in {folder}")


if __name__ == "__main__":
    main()
