"""Rows of the hub's datasets become prompts, and solutions that the recipes' reward reads."""

import pytest

from recipes.data import dapo_row, gsm8k_row

GSM8K = {"question": "How many grams are 1.2 kg?\n", "answer": "1.2 x 1000 = <<1.2*1000=1200>>1200 g\n#### 1,200"}


def test_the_answer_of_gsm8k_is_what_stands_behind_the_hashes():
    row = gsm8k_row(GSM8K)
    assert row["solution"] == "$\\boxed{1200}$"
    (message,) = row["prompt"]
    assert message["role"] == "user" and message["content"].startswith("How many grams are 1.2 kg?\nPlease")


def test_the_answer_of_dapo_math_is_boxed():
    row = dapo_row({"prompt": "Compute 6 x 7.", "solution": "42"})
    assert row["solution"] == "$\\boxed{42}$" and "Compute 6 x 7." in row["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("So it is \\boxed{1200}.", 1.0),
        ("So it is \\boxed{1,200}.", 1.0),
        ("So it is \\boxed{1201}.", 0.0),
        ("I do not know.", 0.0),
    ],
)
def test_the_reward_reads_those_solutions(completion, reward):
    pytest.importorskip("math_verify")
    from trl.rewards import accuracy_reward

    said = [[{"role": "assistant", "content": completion}]]
    assert accuracy_reward(said, [gsm8k_row(GSM8K)["solution"]]) == [reward]
