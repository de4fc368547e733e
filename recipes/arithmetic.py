"""Sums and differences of numbers of up to three digits, for a model that begins badly at them.

    dataset_function: arithmetic.py:sums
    reward_funcs: [arithmetic.py:number]

The prompt is SmolLM2's chat, in which the assistant has begun its answer with the expression and "=".
"""

import random

from datasets import Dataset, DatasetDict

TRAINED, HELD_OUT = 20_000, 512
LARGEST = (9, 99, 999)  # of one, two and three digits
CHAT = (
    "<|im_start|>system\nCalculator.<|im_end|>\n<|im_start|>user\nWhat is {0}?<|im_end|>\n<|im_start|>assistant\n{0} ="
)


def sums() -> DatasetDict:
    """Rows of `prompt` and `solution`, each expression once. A third of the numbers have one digit, two or three."""
    draw, found = random.Random(0), {}
    while len(found) < TRAINED + HELD_OUT:
        one, other = (draw.randint(0, draw.choice(LARGEST)) for _ in range(2))
        sign = draw.choice("+-")
        found[f"{one} {sign} {other}"] = one + other if sign == "+" else one - other
    rows = [{"prompt": CHAT.format(asked), "solution": str(solution)} for asked, solution in found.items()]
    return DatasetDict(train=Dataset.from_list(rows[HELD_OUT:]), test=Dataset.from_list(rows[:HELD_OUT]))


def number(completions: list, solution: list[str], **kwargs) -> list[float]:
    """1 for the number; where it is part of a longer text, its share of the characters. Takes texts and chats."""
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    return [_score(said.strip().replace(",", ""), right) for said, right in zip(texts, solution, strict=True)]


def _score(said: str, solution: str) -> float:
    if said == solution:
        return 1.0
    return len(solution) / len(said) if solution in said else 0.0
