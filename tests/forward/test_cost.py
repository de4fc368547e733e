"""The cost model: by hand for a small shape, and the known ratios of prompt and completion lengths."""

import pytest
from transformers import LlamaConfig, Qwen3Config

from trl_a3po.forward.cost import MIN_SHARING_GAIN, ModelFlops, padded_flops, sharing_gain
from trl_a3po.forward.layout import PackedRow, Segment


def rows(prompt, completion, group):
    """The packed row of a group, unshared and shared."""
    whole = prompt + completion
    unshared = PackedRow(tuple(Segment(i * whole, whole) for i in range(group)))
    continuing = (Segment(prompt + i * completion, completion, 0) for i in range(group))
    return unshared, PackedRow((Segment(0, prompt), *continuing))


def test_operations_of_a_layer_are_those_of_its_matrices():
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    q, k, v, o, mlp = 8 * 8, 8 * 4, 8 * 4, 8 * 8, 3 * 8 * 16
    shape = ModelFlops.of(config)
    assert shape.per_token == 2 * 3 * (q + k + v + o + mlp)
    assert shape.per_pair == 3 * (2 * 8 + 2 * 8)  # scores, and their sum of values
    assert shape.per_scored == 2 * 8 * 50


@pytest.mark.parametrize(
    ("prompt", "completion", "tokens", "pairs"),
    [(512, 4096, 1.11, 1.01), (1024, 1024, 1.78, 1.28), (4096, 512, 4.5, 3.24)],
)
def test_ratios_of_tokens_and_pairs(prompt, completion, tokens, pairs):
    unshared, shared = rows(prompt, completion, 8)
    assert unshared.tokens / shared.tokens == pytest.approx(tokens, abs=0.01)
    assert unshared.pairs / shared.pairs == pytest.approx(pairs, abs=0.01)


QWEN3_06B = ModelFlops.of(
    Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
    )
)


@pytest.mark.parametrize(
    ("prompt", "completion", "pays"), [(512, 4096, False), (1024, 1024, True), (4096, 512, True), (10, 400, False)]
)
def test_a_prompt_is_shared_where_it_pays(prompt, completion, pays):
    gain = sharing_gain(QWEN3_06B, *rows(prompt, completion, 8), scored=8 * completion)
    assert (gain >= MIN_SHARING_GAIN) == pays


def test_a_padded_batch_costs_its_square():
    shape = ModelFlops(per_token=1.0, per_pair=10.0, per_scored=100.0)
    assert padded_flops(shape, rows=2, width=3, scored=4) == 2 * 3 + 10 * 2 * 9 + 100 * 4
