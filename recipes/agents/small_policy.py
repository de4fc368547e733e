"""A policy that is small enough to learn a task on a CPU in minutes: a tokenizer, a model, and supervised steps.

The recipes of this folder need a policy that speaks a chat format and calls tools, and that knows nothing else.
`small_policy` makes one from example conversations, in Qwen2.5's chat format: a tokenizer whose tokens are pieces of
the examples, a model of 0.2 million parameters, and supervised steps on what the assistant says. The examples show how
a task is played, not how it is played well: that is left to reinforcement learning.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, set_seed
from trl.chat_template_utils import get_training_chat_template, qwen2_5_chat_template

Conversation = list[dict[str, Any]]

PAD, END = "<|endoftext|>", "<|im_end|>"
SPECIAL = [AddedToken(text, special=True) for text in (PAD, "<|im_start|>", END)]
LINES = r"[^\n]*\n|[^\n]+"
BATCH = 16  # conversations of a supervised step
LEARNING_RATE = 3e-3  # of the supervised steps


def small_policy(
    examples: Sequence[Conversation], tools: Sequence[Callable] = (), *, pieces: str = LINES, steps: int, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model that imitates the assistant of the examples, and its tokenizer.

    Args:
        examples: conversations.
        tools: the tools that each of them offers.
        pieces: a regular expression for the pieces into which a text falls. No token is longer than a piece; by
            default, pieces are lines.
        steps: supervised steps.
        seed: of the weights and of the order of the examples.
    """
    chats, tools = list(examples), list(tools) or None
    tokenizer = fast(Tokenizer(models.BPE()))
    texts = tokenizer.apply_chat_template(chats, tools=tools, tokenize=False)
    tokenizer = fast(merged(texts, pieces))
    set_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.1,  # of the order of 1 / √hidden_size; the default is for wide models
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    encoded = tokenizer.apply_chat_template(
        chats,
        tools=tools,
        chat_template=get_training_chat_template(tokenizer),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    imitate(model, encoded["input_ids"], encoded["assistant_masks"], steps=steps, seed=seed)
    return model, tokenizer


def imitate(model: PreTrainedModel, ids: list[list[int]], masks: list[list[int]], *, steps: int, seed: int) -> None:
    """Supervised steps on the tokens that the mask has."""
    rows = [(torch.tensor(i), torch.tensor(m, dtype=torch.bool)) for i, m in zip(ids, masks, strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    draw = random.Random(seed)
    for _ in range(steps):
        batch = draw.sample(rows, BATCH)
        inputs = pad_sequence([i for i, _ in batch], batch_first=True, padding_value=model.config.pad_token_id)
        labels = pad_sequence([i.where(m, -100) for i, m in batch], batch_first=True, padding_value=-100)
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def merged(texts: list[str], pieces: str) -> Tokenizer:
    """A byte-level tokenizer, in which pieces that are frequent in the texts are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)  # before training, so that no piece reaches across them
    trainer = trainers.BpeTrainer(
        vocab_size=1 << 14,
        min_frequency=max(2, len(texts) // 200),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    made.chat_template = qwen2_5_chat_template
    return made
