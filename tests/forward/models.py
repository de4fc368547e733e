"""Tiny models in float64, micro-batches as TRL pads them, and log-probs by the plainest way there is: one sequence at
a time, without padding."""

import types
from types import SimpleNamespace

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import SHAPE, VOCAB
from trl_a3po.forward.attention import install_packed_attention
from trl_a3po.models.unwrap import base_model

TEMPERATURE = 0.7
_MIXED = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
# name -> (model type, what its configuration adds to the shape)
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-mixed": ("qwen2", _MIXED),
    "qwen3": ("qwen3", {}),
    "qwen3-mixed": ("qwen3", _MIXED),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 6}),
    "ministral-mixed": ("ministral", _MIXED),
    "granite": ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.8, "logits_scaling": 2.0}),
    "olmo2": ("olmo2", {}),
    "olmo3-mixed": ("olmo3", _MIXED),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "cwm-mixed": ("cwm", _MIXED),
}


def tiny_model(name: str = "llama", *, lora: bool = False, dtype=torch.float64, seed: int = 0, **overrides):
    """A random model with an exact head, its weights spread enough for attention to matter; with `lora`, an adapter
    that changes it."""
    model_type, extra = MODELS[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **extra, **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    add_exact_head(model)
    if lora:
        model = get_peft_model(
            model,
            LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
            autocast_adapter_dtype=False,
        )
    return model.eval()


def packable(model):
    install_packed_attention(base_model(model))
    return model


def add_exact_head(model) -> None:
    """TRL's fused head in the dtype of the model: TRL's own keeps its sums in float32."""
    plain = model.forward

    def forward(self, *args, fused_lm_head=False, shift_labels=None, labels=None, **kwargs):
        if not fused_lm_head:
            return plain(*args, **kwargs)
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        logits = self.get_output_embeddings()(hidden) / getattr(self.config, "logits_scaling", 1.0)
        all_logps = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / TEMPERATURE).log_softmax(-1)
        mask = shift_labels != -100
        logps = all_logps.gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0)
        entropy = -(all_logps.exp() * all_logps).sum(-1).masked_fill(~mask, 0)
        return SimpleNamespace(log_probs=logps, entropy=entropy)

    model.forward = types.MethodType(forward, model)


def micro_batch(prompt_lengths, completion_lengths, same_prompt=(), seed: int = 1, pad: int = 2):
    """`(input_ids, attention_mask, T)`: prompts padded on the left, completions on the right, and by `pad` more.

    Args:
        same_prompt: lists of rows that get the prompt of the first of them.
    """
    generator = torch.Generator().manual_seed(seed)
    width, completion_width = max(prompt_lengths) + pad, max(completion_lengths) + pad
    ids = torch.zeros(len(prompt_lengths), width + completion_width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        ids[row, width - prompt : width + completion] = torch.randint(
            3, VOCAB, (prompt + completion,), generator=generator
        )
        mask[row, width - prompt : width + completion] = 1
    for rows in same_prompt:
        ids[rows, :width], mask[rows, :width] = ids[rows[0], :width].clone(), mask[rows[0], :width].clone()
    return ids, mask, completion_width


def separate(model, input_ids, attention_mask, completion_width):
    """Log-probs and entropies `(B, T)`, each row on its own: no padding, no mask, positions from 0."""
    split = input_ids.shape[1] - completion_width
    nothing = torch.zeros(0, dtype=next(model.parameters()).dtype, device=input_ids.device)
    rows = [(nothing, nothing)] * len(input_ids)
    for row, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
        count = int(mask[split:].sum())
        if count:
            out = model(input_ids=ids[mask][None], labels=ids[mask][None], fused_lm_head=True)
            rows[row] = out.log_probs[0, -count:], out.entropy[0, -count:]
    pad = torch.nn.functional.pad
    logps = torch.stack([pad(values, (0, completion_width - len(values))) for values, _ in rows])
    entropies = torch.stack([pad(values, (0, completion_width - len(values))) for _, values in rows])
    return logps, entropies
