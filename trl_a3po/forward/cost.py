"""What a forward costs, in floating-point operations, and when sharing a prompt pays.

Guarantees: pure arithmetic on a model's shape and a packed row. Operations of one forward; a backward is about twice
that and gradient checkpointing once more, alike for every layout, so ratios hold for all of them.

With P prompt tokens and G completions of R tokens, sharing turns `G·(P + R)` tokens into `P + G·R`, and about
`G·(P + R)² / 2` pairs of attention into `P²/2 + G·(P·R + R²/2)`.
"""

from dataclasses import dataclass
from typing import Any

from trl_a3po.forward.layout import PackedRow

# Below, what sharing saves is of the order of what its second attention call costs.
LEAST_GAIN = 1.1


@dataclass(frozen=True)
class ModelShape:
    """Operations of a forward: for each token, for each pair of a query and a key, for each scored token."""

    per_token: float
    per_pair: float
    per_scored: float

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """From the configuration of a decoder with gated MLPs."""
        config = config.get_text_config()
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config.intermediate_size
        return cls(
            per_token=2.0 * config.num_hidden_layers * layer,
            per_pair=4.0 * config.num_hidden_layers * heads * head_dim,
            per_scored=2.0 * hidden * config.vocab_size,
        )

    def cost(self, tokens: int, pairs: int, scored: int) -> float:
        return self.per_token * tokens + self.per_pair * pairs + self.per_scored * scored


def cost(shape: ModelShape, row: PackedRow, scored: int) -> float:
    """Operations of a packed row's forward."""
    return shape.cost(row.tokens, row.pairs, scored)


def padded_cost(shape: ModelShape, rows: int, width: int, scored: int) -> float:
    """Operations of a padded forward of `rows` rows of `width` tokens, whose mask hides padding but saves nothing."""
    return shape.cost(rows * width, rows * width * width, scored)


def sharing_gain(shape: ModelShape, apart: PackedRow, shared: PackedRow, scored: int) -> float:
    """How many times cheaper the same micro-batch is with its prompts shared."""
    return cost(shape, apart, scored) / cost(shape, shared, scored)
