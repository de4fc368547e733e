"""Docstring paragraphs are filled: no line of one or two words stands in the middle of a paragraph."""

import ast
from pathlib import Path

import trl_a3po

PACKAGE = Path(trl_a3po.__file__).parent
FULL = 100  # a line of this length was broken because it was full, not because a list or a block of code goes on


def orphans(docstring: str) -> list[str]:
    """The lines of one or two words that follow a full line and do not end a sentence or an item of a list."""
    lines = docstring.splitlines()
    found = []
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        words = line.split()
        in_paragraph = len(before) > FULL and after.strip() and not line.rstrip().endswith((".", ";", ":"))
        if in_paragraph and 1 <= len(words) <= 2 and not words[-1].endswith('."'):
            found.append(line.strip())
    return found


def test_no_docstring_has_a_broken_line():
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for node in (node for node in nodes if isinstance(node, documented)):
            if lines := orphans(ast.get_docstring(node, clean=False) or ""):
                found[f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}"] = lines
    assert found == {}
