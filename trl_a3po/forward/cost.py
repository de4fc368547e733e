"""What a forward costs, in floating-point operations, and when sharing a prompt pays.

Guarantees: pure arithmetic on a model's shape and a packed row. Operations of one forward; a backward is about twice
that and gradient checkpointing once more, alike for every layout, so ratios hold for all of them.

They are operations, not seconds. Held against an H100 (`recipes/benchmarks/training_forward.py`; models of 0.6B, 1.5B
and 8B), a packed row beats a padded batch by 0.87 to 1.07 times what they say. A shared row beats one without sharing
by 0.80 to 0.96 times that, because prompts are attended to in a call of their own; and by less where the forward and
backward of a micro-batch take under a quarter of a second, which is what launching the kernels of 28 layers takes.

With P prompt tokens and G completions of R tokens, sharing turns `G·(P + R)` tokens into `P + G·R`, and about
`G·(P + R)² / 2` pairs of attention into `P²/2 + G·(P·R + R²/2)`.
"""

from dataclasses import dataclass
from typing import Any

from trl_a3po.forward.layout import PackedRow

# Where operations say that sharing saves little (512/4096/8: gains of 1.17, 1.22 and 1.25 for the three models), gains
# of 1.07, 1.12 and 1.19 were measured: the second attention call costs 4% to 9%, and from 1.1 on sharing pays.
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
        head_dim = head_dim_of(config)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config.intermediate_size
        return cls(
            per_token=2.0 * config.num_hidden_layers * layer,
            per_pair=4.0 * config.num_hidden_layers * heads * head_dim,
            per_scored=2.0 * hidden * config.vocab_size,
        )

    def cost(self, tokens: int, pairs: int, scored: int) -> float:
        return self.per_token * tokens + self.per_pair * pairs + self.per_scored * scored


def head_dim_of(config: Any) -> int:
    """Numbers of one head's query."""
    config = config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def cost(shape: ModelShape, row: PackedRow, scored: int) -> float:
    """Operations of a packed row's forward."""
    return shape.cost(row.tokens, row.pairs, scored)


def padded_cost(shape: ModelShape, rows: int, width: int, scored: int) -> float:
    """Operations of a padded forward of `rows` rows of `width` tokens, whose mask hides padding but saves nothing."""
    return shape.cost(rows * width, rows * width * width, scored)


def sharing_gain(shape: ModelShape, apart: PackedRow, shared: PackedRow, scored: int) -> float:
    """How many times cheaper the same micro-batch is with its prompts shared."""
    return cost(shape, apart, scored) / cost(shape, shared, scored)
