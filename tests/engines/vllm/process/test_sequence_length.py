"""How many tokens vLLM has to hold for a sequence."""

import pytest

from trl_a3po.engines.vllm.process.vllm_engine import sequence_length


@pytest.mark.parametrize(
    "asked, prompt, model_has, expected",
    [
        (None, 30, 64, 39),  # 30 + 8, and one more for scores
        (None, None, 64, 64),
        (48, 30, 64, 49),
        (None, 60, 64, 64),  # a completion ends where the context ends
        (None, 30, None, 39),
        (48, None, None, 49),
    ],
)
def test_a_sequence_has_room_for_a_prompt_its_completion_and_a_score(asked, prompt, model_has, expected):
    assert sequence_length(asked, prompt, 8, model_has) == expected


def test_a_model_without_a_limit_needs_a_setting():
    with pytest.raises(ValueError, match="set vllm_max_model_length or engine_max_prompt_tokens"):
        sequence_length(None, None, 8, None)
