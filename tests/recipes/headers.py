"""The recipes, and the commands that stand on top of each."""

import re
import shlex
from pathlib import Path

UNAVAILABLE = "is not available in this version"  # what a setting says that a recipe is ahead of
ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def commands(text: str) -> list[list[str]]:
    """The words of every command in `text` that calls `trl-a3po train`, or `-m trl_a3po train` under a launcher."""
    lines = [re.sub(r"^#\s?", "", line) for line in text.splitlines()]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    found = [line.strip() for line in joined if re.search(r"trl[-_]a3po train \S+\.yaml", line)]
    return [shlex.split(line, comments=True) for line in found if "`" not in line]


def train_arguments(words: list[str]) -> list[str]:
    return words[words.index("train") + 1 :]


def launcher_value(words: list[str], option: str, otherwise: int) -> int:
    return int(words[words.index(option) + 1]) if option in words else otherwise
