"""A tiny policy that speaks Qwen3's chat format, a byte a token, and what it is made to say in tests."""

import json
from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return fast


TOKENIZER = chat_tokenizer()


def chat_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=4096, eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id, bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def questions(rows: int = 8, **columns) -> Dataset:
    prompts = [[{"role": "user", "content": f"q{i}"}] for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "number": list(range(rows)), **columns})


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def said(text: str) -> list[int]:
    """A whole turn."""
    return [*tokens(text), TOKENIZER.eos_token_id]


def call(name: str, **arguments) -> str:
    """The text of a call of a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def results_in(prompt_ids) -> int:
    """How many results of tools a conversation holds."""
    return TOKENIZER.decode(prompt_ids).count("<tool_response>")
