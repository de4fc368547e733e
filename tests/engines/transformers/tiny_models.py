"""Models of two layers built from a configuration, and the ways tests drive a decoder over them."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import SHAPE, VOCAB
from trl_a3po.engines.transformers.decoder import SlotDecoder
from trl_a3po.protocol.engine import GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.records import Rollout

MIXED = ["sliding_attention", "full_attention"]
MIXED_WINDOW = {"sliding_window": 5, "layer_types": MIXED}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# Latent attention: keys and values differ in width.
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
# name -> (model type, what its configuration adds to the shape)
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-eager": ("llama", {"attn_implementation": "eager"}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48, "do_layer_norm_before": True}),
    "phi": ("phi", {}),
    "gemma": ("gemma", {}),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {}),
    "cohere": ("cohere", {}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral-sliding": ("mistral", {"sliding_window": 6}),
    "ministral3-sliding": ("ministral3", {"sliding_window": 6}),
    "phi3-sliding": ("phi3", {"sliding_window": 6}),
    "starcoder2-sliding": ("starcoder2", {"sliding_window": 6}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, **MIXED_WINDOW}),
    "qwen3-sliding": ("qwen3", {"use_sliding_window": True, **MIXED_WINDOW}),
    "gemma2-sliding": ("gemma2", {"attn_implementation": "eager", **MIXED_WINDOW}),
    "gemma3-sliding": ("gemma3_text", MIXED_WINDOW),
    "olmo3-sliding": ("olmo3", MIXED_WINDOW),
    "smollm3-sliding": ("smollm3", {"use_sliding_window": True, **MIXED_WINDOW}),
    "ministral-sliding": ("ministral", MIXED_WINDOW),
    "cohere2-sliding": ("cohere2", MIXED_WINDOW),
    "exaone4-sliding": ("exaone4", {"sliding_window_pattern": 2, **MIXED_WINDOW}),
    "cwm-sliding": ("cwm", MIXED_WINDOW),
    "vaultgemma-sliding": ("vaultgemma", {"attn_implementation": "eager", **MIXED_WINDOW}),
}
MIXTURES: dict[str, tuple[str, dict]] = {
    "mixtral-sliding": ("mixtral", {"sliding_window": 6, **MOE}),
    "phimoe-sliding": ("phimoe", {"sliding_window": 6, **MOE}),
    "qwen2_moe-sliding": ("qwen2_moe", {"use_sliding_window": True, **MOE, **MIXED_WINDOW}),
    "qwen3_moe-sliding": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6, **MOE}),
    "dots1-sliding": ("dots1", {**MOE, **MIXED_WINDOW}),
    "gpt_oss-sliding": ("gpt_oss", {"attn_implementation": "eager", **MOE, **MIXED_WINDOW}),
    "deepseek_v3": ("deepseek_v3", {**MOE, **MLA, "num_key_value_heads": 4}),
}


def tiny_model(name: str = "llama", seed: int = 0, **overrides) -> torch.nn.Module:
    """A random model of `MODELS` or `MIXTURES`, fp32, with logits spread enough for choices to differ."""
    model_type, extra = (MODELS | MIXTURES)[name]
    extra = {**extra, **overrides}
    attention = extra.pop("attn_implementation", "sdpa")
    config = AutoConfig.for_model(model_type, **{**SHAPE, **extra})
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
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().cpu()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def gap(model: torch.nn.Module, prompt, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """|recorded - clean| log-prob of each token, `(T,)`."""
    return (torch.tensor(rollout.logps) - clean_logps(model, prompt, rollout.token_ids, temperature)).abs()
