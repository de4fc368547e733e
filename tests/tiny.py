"""A tiny policy, its tokenizer and a dataset, built from nothing: no hub, no files but those a test asks for."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

VOCAB = 64
SHAPE = {  # of models of every architecture
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WORDS = [f"w{i}" for i in range(VOCAB - 3)]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.3,  # peaked enough that updates move log-probs
    }
    return LlamaConfig(**{**settings, **changes})


def save_tiny_model(folder, seed: int = 0, **changes) -> str:
    """A random tiny model with its tokenizer in `folder`, fp32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(**changes), dtype=torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_prompts(rows: int = 32) -> Dataset:
    """Prompts of one to four words, each different."""
    prompts = [
        " ".join(WORDS[(7 * i + j) % len(WORDS)] for j in range(1 + i % 4)) + f" {WORDS[i]}" for i in range(rows)
    ]
    return Dataset.from_dict({"prompt": prompts, "target": list(range(rows))})
