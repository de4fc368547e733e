"""Two tasks of reasoning-gym that SmolLM2-135M-Instruct begins badly at and learns in some tens of steps.

    python recipes/learning/tasks.py            # draws the rows again; needs reasoning-gym

The rows are JSON lines beside this file, so a run does not need reasoning-gym. Held-out rows share no question with
those that are trained on. The scores are those of reasoning-gym's `chain_sum` and `spell_backward`, in one function
each; a test compares them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "rows"
TRAINED, HELD_OUT = 512, 128
Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Task:
    """Where its rows come from, and how they are asked and scored.

    Args:
        source: the name in reasoning-gym, and `settings` its settings there.
        question: the key of the entry's metadata that is kept as the question.
        chat: question -> the chat; where the last turn is the assistant's, the model goes on with it.
        score: what the model said, and the right answer -> from 0 to 1.
        tokens: longest completion.
    """

    source: str
    settings: dict[str, Any]
    question: str
    chat: Callable[[str], Chat]
    score: Callable[[str, str], float]
    tokens: int


def number_score(said: str, answer: str) -> float:
    """1 for the number, and where the number is part of a longer text, its share of the characters."""
    said = said.replace(",", "")
    try:
        if Decimal(said) == Decimal(answer):
            return 1.0
    except InvalidOperation:
        pass
    return len(answer) / len(said) if answer in said else 0.0


def spelling_score(said: str, answer: str) -> float:
    """1 for the word; otherwise the share of its letters that are in place, and 0.8 for a word with an ending.
    Spaces do not count, because the model is shown words letter by letter."""
    said, answer = said.lower().replace(" ", ""), answer.lower()
    if said == answer:
        return 1.0
    share = 0.0
    for one, other in zip(said, answer, strict=False):
        share += (one == other) / len(answer)
    return share - 0.2 if share == 1.0 else share


def ask_sum(expression: str) -> Chat:
    return [
        {"role": "system", "content": "Calculator."},
        {"role": "user", "content": f"What is {expression}?"},
        {"role": "assistant", "content": f"{expression} ="},
    ]


def ask_spelling(word: str) -> Chat:
    shown = (("dog", "god"), ("tree", "eert"), ("map", "pam"))
    chat = [{"role": "system", "content": "Letters backward."}]
    for one, other in shown:
        chat += [{"role": "user", "content": " ".join(one)}, {"role": "assistant", "content": " ".join(other)}]
    return [*chat, {"role": "user", "content": " ".join(word.lower())}]


TASKS = {
    "sums": Task(
        source="chain_sum",
        settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        question="expression",
        chat=ask_sum,
        score=number_score,
        tokens=8,
    ),
    "spelling": Task(
        source="spell_backward",
        settings={"min_word_len": 3, "max_word_len": 4},
        question="word",
        chat=ask_spelling,
        score=spelling_score,
        tokens=8,
    ),
}


def rows(task: str, split: str) -> list[dict[str, str]]:
    """The rows of a split, `"train"` or `"held_out"`, each with its `question` and `answer`."""
    every = [json.loads(line) for line in (FOLDER / f"{task}.jsonl").read_text().splitlines()]
    return every[HELD_OUT:] if split == "train" else every[:HELD_OUT]


def prompt_of(task: str, tokenizer: Any, question: str) -> str:
    chat = TASKS[task].chat(question)
    ending = {"continue_final_message": True} if chat[-1]["role"] == "assistant" else {"add_generation_prompt": True}
    text: str = tokenizer.apply_chat_template(chat, tokenize=False, **ending)
    return text


def scores(task: str, said: Sequence[str], answers: Sequence[str]) -> list[float]:
    score = TASKS[task].score
    return [score(one.strip(), answer) for one, answer in zip(said, answers, strict=True)]


def draw_rows(task: str) -> list[dict[str, str]]:
    """`HELD_OUT` rows, then `TRAINED`, of different questions, drawn by reasoning-gym with seed 0."""
    import reasoning_gym

    found: dict[str, str] = {}
    settings = TASKS[task].settings
    for entry in reasoning_gym.create_dataset(TASKS[task].source, size=20 * TRAINED, seed=0, **settings):
        if len(found) < HELD_OUT + TRAINED:
            found.setdefault(entry["metadata"][TASKS[task].question], entry["answer"])
    return [{"question": question, "answer": answer} for question, answer in found.items()]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in TASKS:
        drawn = "".join(json.dumps(row) + "\n" for row in draw_rows(name))
        (FOLDER / f"{name}.jsonl").write_text(drawn)
