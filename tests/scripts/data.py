"""Prompts for the scripts: short questions in words that the tiny tokenizer knows, each different."""

from datasets import Dataset

from tests.tiny import WORDS


def questions(rows: int = 24, first: int = 0) -> Dataset:
    """Rows with `question` and `answer`."""
    numbers = range(first, first + rows)
    return Dataset.from_list(
        [
            {"question": f"{WORDS[i % 61]} {WORDS[(7 * i + i // 61) % 61]}", "answer": WORDS[3 * i % 61]}
            for i in numbers
        ]
    )


def prompts(rows: int = 24, first: int = 0) -> Dataset:
    """Rows with `prompt` and `answer`."""
    return questions(rows, first).rename_column("question", "prompt")


def text_of(completion) -> str:
    """A completion as text, plain or conversational."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def contains_answer(completions, answer, **kwargs):
    """A reward with some spread: how early the first letters of the answer appear."""
    found = [text_of(completion).find(gold[:2]) for completion, gold in zip(completions, answer, strict=True)]
    return [1.0 / (1 + place) if place >= 0 else 0.0 for place in found]


def length(completions, **kwargs):
    return [len(text_of(completion)) / 20 for completion in completions]
