"""`--smoke`: run a recipe with a model and a dataset so small that it takes seconds on a CPU.

Guarantees: needs no hub; replaces only what makes a run large (model, data, sizes, steps), so the run has the
objective, schedule, adapter and rewards of the recipe.
"""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

NUMBERS = [str(number) for number in range(20)]
WORDS = ["What", "is", "+", "?", "user", "assistant", "answer", "the", "boxed", ":"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
SMALL = {
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 8,
    "max_steps": 3,
    "logging_steps": 1,
    "warmup_steps": 0,
    "dtype": "float32",
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_on_start": False,
    "log_completions": "false",
    "reward_workers": 1,
}


def smoke_arguments(folder: str | Path) -> list[str]:
    """Command-line arguments that make a recipe small. Writes the tiny model to `folder`."""
    model = Path(folder) / f"smoke_model_{os.environ.get('LOCAL_RANK', '0')}"  # each process has its own
    save_smoke_model(model)
    arguments = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    return [*arguments, "--model_name_or_path", str(model)]


def smoke_rows(size: int = 32) -> Dataset:
    """`size` sums of two numbers, as chats, with the answer as `solution`."""
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(size)]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"What is {a} + {b} ?"}], "solution": f"\\boxed{{{a + b}}}"}
            for a, b in pairs
        ]
    )


def smoke_reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
    """The share of even token ids, which varies between completions of a random model, while right answers are
    rare."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def save_smoke_model(folder: Path) -> None:
    """Write a random two-layer Llama and its tokenizer to `folder`."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *WORDS, *NUMBERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # spaces between words
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
