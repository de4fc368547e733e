"""What a forward costs, in floating-point operations, and when sharing a prompt pays.

Guarantees: pure arithmetic on the configuration of a model and a packed row. The operations are those of one forward.
A backward takes about twice as many and gradient checkpointing once more, for every layout alike, so the ratios of two
layouts hold for training as a whole.

Operations are not seconds. Measured on an H100 (`recipes/benchmarks/training_forward.py`; models of 0.6B, 1.5B and
8B), the speedup of a packed row over a padded batch is 0.87 to 1.07 times the ratio of their operations. The speedup
of a shared prompt is 0.80 to 0.96 times that ratio, because prompts are attended to in a separate call; it is smaller
still where the forward and backward of a micro-batch take under a quarter of a second, because launching the kernels
of 28 layers takes that long.

With P prompt tokens and G completions of R tokens, sharing turns `G·(P + R)` tokens into `P + G·R`, and about
`G·(P + R)² / 2` pairs of attention into `P²/2 + G·(P·R + R²/2)`.
"""

from dataclasses import dataclass
from typing import Any

from trl_a3po.forward.layout import PackedRow
from trl_a3po.models.attention_shape import head_dim, num_kv_heads

# Where sharing saves few operations (512/4096/8: predicted gains of 1.17, 1.22 and 1.25 for the three models), gains
# of 1.07, 1.12 and 1.19 were measured: the second attention call costs 4% to 9%, so sharing pays from 1.1 on.
MIN_SHARING_GAIN = 1.1


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a model's forward: for each token, for each pair of a query and a key, for each scored token."""

    per_token: float
    per_pair: float
    per_scored: float

    @classmethod
    def of(cls, config: Any) -> "ModelFlops":
        """From the configuration of a decoder with gated MLPs."""
        config = config.get_text_config()
        hidden, heads = config.hidden_size, config.num_attention_heads
        attention = hidden * head_dim(config) * (2 * heads + 2 * num_kv_heads(config))
        layer = attention + 3 * hidden * config.intermediate_size
        return cls(
            per_token=2.0 * config.num_hidden_layers * layer,
            per_pair=4.0 * config.num_hidden_layers * heads * head_dim(config),
            per_scored=2.0 * hidden * config.vocab_size,
        )

    def total(self, tokens: int, pairs: int, scored: int) -> float:
        return self.per_token * tokens + self.per_pair * pairs + self.per_scored * scored


def packed_flops(model: ModelFlops, row: PackedRow, scored: int) -> float:
    """Operations of the forward of a packed row."""
    return model.total(row.tokens, row.pairs, scored)


def padded_flops(model: ModelFlops, rows: int, width: int, scored: int) -> float:
    """Operations of the padded forward of `rows` rows of `width` tokens: the mask hides padding but saves nothing."""
    return model.total(rows * width, rows * width * width, scored)


def sharing_gain(model: ModelFlops, unshared: PackedRow, shared: PackedRow, scored: int) -> float:
    """How many times fewer operations a micro-batch takes when its prompts are shared."""
    return packed_flops(model, unshared, scored) / packed_flops(model, shared, scored)
