"""A notebook with five small rewards, one of which prints, on a model that is loaded before; trained twice, as a cell
is run twice."""

import re

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import questions


def correctness(prompts, completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    print("-" * 20, f"Question:\n{prompts[0][-1]['content']}", f"\nResponse:\n{responses[0]}")
    return [2.0 if gold in response else 0.0 for response, gold in zip(responses, answer, strict=True)]


def is_int(completions, **kwargs):
    return [0.5 if completion[0]["content"][-1:].isdigit() else 0.0 for completion in completions]


def strict_format(completions, **kwargs):
    return [0.5 if re.match(r"^w\d+ w\d+ w\d+$", completion[0]["content"]) else 0.0 for completion in completions]


def soft_format(completions, **kwargs):
    return [0.5 if re.search(r"w\d+ w\d+", completion[0]["content"]) else 0.0 for completion in completions]


def count_words(completions, **kwargs):
    return [0.125 * completion[0]["content"].count("w") for completion in completions]


def main(model, folder):
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    data = questions().map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
    for _ in range(2):
        trainer = GRPOTrainer(
            model=policy,
            processing_class=tokenizer,
            reward_funcs=[count_words, soft_format, strict_format, is_int, correctness],
            args=GRPOConfig(output_dir=folder, max_steps=2, weight_decay=0.1, max_grad_norm=0.1),
            train_dataset=data,
        )
        trainer.train()
    trainer.save_model(folder)
    return trainer
