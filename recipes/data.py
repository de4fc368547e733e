"""The datasets of the recipes, from the hub, as rows of `prompt` (a chat) and `solution` (what math-verify reads).

    dataset_function: data.py:gsm8k

Both ask for the answer in \\boxed{}, which is where `accuracy_reward` looks for it.
"""

from datasets import DatasetDict, load_dataset

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def gsm8k() -> DatasetDict:
    """`openai/gsm8k`: 7,473 grade-school word problems to train on, 1,319 to test; MIT."""
    dataset = load_dataset("openai/gsm8k", "main")
    return dataset.map(gsm8k_row, remove_columns=["question", "answer"])


def dapo_math() -> DatasetDict:
    """`open-r1/DAPO-Math-17k-Processed`: the 17k distinct problems of DAPO-Math-17k, whose answers are integers;
    Apache-2.0. 500 of them are held out."""
    dataset = load_dataset("open-r1/DAPO-Math-17k-Processed", "all", split="train")
    dataset = dataset.map(dapo_row, remove_columns=dataset.column_names)
    return dataset.train_test_split(test_size=500, seed=0)


def gsm8k_row(row: dict) -> dict:
    """A row of `openai/gsm8k`, whose answer follows `####` and has commas between thousands."""
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {"prompt": _ask(row["question"]), "solution": _boxed(answer)}


def dapo_row(row: dict) -> dict:
    """A row of `open-r1/DAPO-Math-17k-Processed`."""
    return {"prompt": _ask(row["prompt"]), "solution": _boxed(row["solution"])}


def _ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{question.strip()}\n{INSTRUCTION}"}]


def _boxed(answer: str) -> str:
    return f"$\\boxed{{{answer.strip()}}}$"
