"""Models of two layers built from a configuration, and the ways tests drive a decoder over them."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trl_a3po.engines.embedded.decoder import SlotDecoder
from trl_a3po.engines.protocol import GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.rollout.records import Rollout

VOCAB = 64
_SHAPE = {
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
MIXED = ["sliding_attention", "full_attention"]
# name -> (model type, what its configuration adds to the shape)
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-eager": ("llama", {"attn_implementation": "eager"}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": MIXED},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-sliding": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": MIXED},
    ),
    "mistral-sliding": ("mistral", {"sliding_window": 6}),
    "gemma2-sliding": ("gemma2", {"sliding_window": 5, "attn_implementation": "eager", "layer_types": MIXED}),
    "gemma3-sliding": ("gemma3_text", {"sliding_window": 5, "layer_types": MIXED}),
}


def tiny_model(name: str = "llama", seed: int = 0, **overrides) -> torch.nn.Module:
    """A random model of `MODELS`, fp32, with logits spread enough for choices to differ."""
    model_type, extra = MODELS[name]
    extra = {**extra, **overrides}
    attention = extra.pop("attn_implementation", "sdpa")
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **extra})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    return model.eval()


def moved(model: torch.nn.Module, seed: int = 100, scale: float = 0.15) -> torch.nn.Module:
    """A copy of the model with every matrix changed by an update large enough to matter."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def load(model: torch.nn.Module, other: torch.nn.Module) -> None:
    """Change the model's weights in place to those of `other`."""
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)


def settings(max_new_tokens: int = 8, **changes) -> SamplingSettings:
    return SamplingSettings(**{"max_new_tokens": max_new_tokens, "stop_token_ids": (), "seed": 5, **changes})


def request(number: int, prompt, rollouts: int = 1, noise_key: int | None = None) -> GroupRequest:
    return GroupRequest(number, number if noise_key is None else noise_key, tuple(prompt), rollouts)


def prompts(count: int, longest: int = 12, seed: int = 3) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


def run(decoder: SlotDecoder, requests=(), limit: int = 1000) -> dict[int, list[Rollout]]:
    """Submit and step until idle."""
    for one in requests:
        decoder.submit(one)
    finished: list[GroupFinished] = []
    for _ in range(limit):
        if decoder.idle:
            return {group.request_id: group.rollouts for group in finished}
        finished += decoder.step()
    raise AssertionError(f"not idle after {limit} steps")


@torch.no_grad()
def clean_logps(model: torch.nn.Module, prompt, completion, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs `(T,)` of the completion by one forward over the whole sequence, without a cache."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def gap(model: torch.nn.Module, prompt, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """|recorded - clean| log-prob of each token, `(T,)`."""
    return (torch.tensor(rollout.logps) - clean_logps(model, prompt, rollout.token_ids, temperature)).abs()
