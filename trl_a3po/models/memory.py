"""How much memory a model takes: weights, gradients, optimizer states, activations, KV cache.

Guarantees: pure arithmetic on counts; an estimate says what it leaves out, and an optimizer whose states are not known
has `None` instead of a guess.
"""

from dataclasses import dataclass
from typing import Any, Self

from trl_a3po.models.attention_shape import head_dim, kv_values_per_token, num_kv_heads

GIB = 2**30
FP32_BYTES = 4

SAME_DTYPE_STATES = {  # numbers of the parameter's dtype that an optimizer keeps for each trained number
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), 2),
    **dict.fromkeys(("stable_adamw", "schedule_free_adamw", "schedule_free_radam"), 2),
    **dict.fromkeys(("adagrad", "rmsprop", "schedule_free_sgd"), 1),
    "ademamix": 3,
    "sgd": 0,  # transformers' has no momentum
    "adafactor": 0,  # a row and a column of each matrix
}
FIXED_BYTES = {  # bytes that an optimizer keeps for each trained number, whatever the dtype of the parameter
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), 2.0),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit", "adamw_torch_4bit"), 1.0),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"), 4.0),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), 3.0),
    "paged_adamw_32bit": 8.0,
    "paged_ademamix_32bit": 12.0,
}


def optimizer_bytes(optim: str, element_size: int, *, deepspeed: bool = False) -> float | None:
    """Bytes that the optimizer called `optim` in `TrainingArguments` keeps for each trained number, `None` if that is
    not known.

    Args:
        element_size: bytes of a trained number.
        deepspeed: DeepSpeed keeps states in float32, and a float32 copy of weights that have fewer bytes.
    """
    if optim in FIXED_BYTES:
        return FIXED_BYTES[optim]
    if optim not in SAME_DTYPE_STATES:
        return None
    if not deepspeed:
        return float(SAME_DTYPE_STATES[optim] * element_size)
    master = FP32_BYTES if element_size < FP32_BYTES else 0
    return float(SAME_DTYPE_STATES[optim] * FP32_BYTES + master)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of a decoder-only model with gated feed-forward layers, from its configuration.

    Args:
        layers, hidden, intermediate, vocabulary: as in the configuration.
        queries, keys: features of all query heads, and of all key heads.
        kv_values: numbers in the KV cache for one token.
    """

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    queries: int
    keys: int
    kv_values: int

    @classmethod
    def of(cls, config: Any) -> Self:
        text = config.get_text_config()
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,  # GPT-2's has no such name
            vocabulary=text.vocab_size,
            queries=text.num_attention_heads * head_dim(text),
            keys=num_kv_heads(text) * head_dim(text),
            kv_values=kv_values_per_token(text),
        )

    def activation_bytes(self, tokens: int, element_size: int, *, checkpointing: bool) -> int:
        """An estimate of what a forward pass over `tokens` tokens keeps for its backward pass.

        A layer keeps the inputs of its two norms, of its projections and of its gated feed-forward part, and what
        attention needs, without a matrix of attention weights. With gradient checkpointing, every layer keeps its
        input, and one layer at a time all of this. The logits are kept twice, once in float32.
        """
        layer = tokens * (
            element_size * (4 * self.hidden + 3 * self.queries + 4 * self.keys + 4 * self.intermediate)
            + FP32_BYTES * 2 * self.hidden
        )
        logits = tokens * self.vocabulary * (element_size + FP32_BYTES)
        if not checkpointing:
            return self.layers * layer + logits
        return self.layers * tokens * self.hidden * element_size + layer + logits
